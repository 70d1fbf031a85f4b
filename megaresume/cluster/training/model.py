"""megatron-core's GPTModel, with attention within documents only.

The attention is set as ``core_attention`` of the layer spec, a public extension point of megatron-core: torch's scaled
dot product attention with an explicit mask. It runs on CPU and GPU (there in fused kernels).

The loss, minimised and reported, does not depend on the data-parallel and the micro-batch size.

Minimised: the sum of the token losses of a global batch, divided by its G * S positions. A mean over trained tokens of
each micro-batch (which many programs use) gives a token a weight that depends on how full the *others* in its
micro-batch are, and so on the layout; the number of positions is constant, so DeepSpeed's averaging over micro-steps
and ranks is exact. With packed samples, nearly all positions are trained tokens. Adam is insensitive to the scale.

Reported: the sum of the token losses of the global batch, divided by its number of trained tokens, summed in float64.

The learning rate is a pure function of trained samples, so it needs no saving. Its shapes are Megatron-LM's
(megatron.core.optimizer_param_scheduler), which counts in samples as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention

from megaresume.cluster.training.launch import Arguments, DecayStyle
from megaresume.stream.batches import BatchSchedule


class ModelParallelUnit:
    """DeepSpeed's ``mpu``: `megatron.core.parallel_state`, with the names that it has dropped."""

    def __getattr__(self, name: str) -> Any:
        return getattr(parallel_state, name)

    def get_model_parallel_world_size(self) -> int:
        """The number of ranks that share one model: tensor times pipeline parallel."""
        return int(
            parallel_state.get_tensor_model_parallel_world_size()
            * parallel_state.get_pipeline_model_parallel_world_size()
        )

    def get_model_parallel_rank(self) -> int:
        """The rank of this process within its model-parallel group."""
        return dist.get_rank(parallel_state.get_model_parallel_group())


def loss_to_minimise(token_losses: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """The sum of the trained tokens' losses in a micro-batch, divided by its number of positions.

    Args:
        token_losses: float[m, S].
        loss_mask: float32[m, S], 1 where the label is trained.

    Returns:
        float32 scalar.
    """
    return (token_losses.float() * loss_mask).sum() / loss_mask.numel()


class LossMeter:
    """Sums of token losses and of trained tokens, over micro-batches and then over data-parallel ranks."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, token_losses: torch.Tensor, loss_mask: torch.Tensor) -> None:
        """Add one micro-batch: float[m, S] each."""
        losses = (token_losses.detach().double() * loss_mask).sum()
        self._sums[0] += losses
        self._sums[1] += loss_mask.sum()

    def reduce(self, group: dist.ProcessGroup | None) -> tuple[float, int]:
        """Sum over the ranks of a group (the data-parallel ranks).

        Returns:
            loss per trained token, and the number of trained tokens.
        """
        dist.all_reduce(self._sums, group=group)
        total, tokens = self._sums.tolist()
        return total / max(tokens, 1.0), int(tokens)


def document_mask(position_ids: torch.Tensor) -> torch.Tensor:
    """The mask of forbidden attention: to later tokens, and to other documents.

    Args:
        position_ids: int64[m, S], starting at 0 in every segment.

    Returns:
        bool[m, 1, S, S], True where attention is forbidden (Megatron's convention).
    """
    # segments: int64[m, S], the number of the segment that each token is in.
    segments = (position_ids == 0).cumsum(dim=1)
    other = segments[:, :, None] != segments[:, None, :]
    seq_length = position_ids.shape[1]
    later = torch.ones(seq_length, seq_length, dtype=torch.bool, device=position_ids.device).triu(diagonal=1)
    return (other | later)[:, None]


class DocumentAttention(MegatronModule):  # type: ignore[misc,unused-ignore]
    """Core attention that uses the mask it is given, whatever the layer's mask type is."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Compute attention.

        Args:
            query: [S, m, heads, width]; key and value: [S, m, groups, width].
            attention_mask: bool[m, 1, S, S], True where attention is forbidden.

        Returns:
            [S, m, heads * width].
        """
        seq_length, batch, heads, width = query.shape
        # q, k, v: [m, heads, S, width]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        attended = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=~attention_mask,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.softmax_scale,
            enable_gqa=k.shape[1] != heads,
        )
        return attended.permute(2, 0, 1, 3).reshape(seq_length, batch, heads * width)


def padded_vocabulary(vocab_size: int, args: Arguments) -> int:
    """Rows of the embedding table, padded to a multiple as in Megatron."""
    multiple = 128 * args.tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple


def build_model(args: Arguments, *, vocab_size: int, seq_length: int, device: torch.device) -> GPTModel:
    """Build the model of this rank; the weights depend on ``args.seed``, but not on the data-parallel size.

    Args:
        args: the flags.
        vocab_size: number of token ids, not padded.
        seq_length: tokens per sample.
        device: for training; a CPU is also used for initialisation.
    """
    cpu = device.type == "cpu"
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=args.init_method_std,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        use_cpu_initialization=cpu,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=args.bf16,
        deterministic_mode=args.deterministic_mode,
        # These fusions need extensions that may be missing; besides, DeepSpeed owns the gradients.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=not cpu,
        bias_dropout_fusion=not cpu,
    )
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = DocumentAttention
    torch.manual_seed(args.seed)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocabulary(vocab_size, args),
        max_sequence_length=seq_length,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        parallel_output=True,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """Warm-up and decay, by number of samples."""

    style: DecayStyle
    highest: float
    lowest: float
    warmup_samples: int
    decay_samples: int

    @classmethod
    def from_arguments(cls, args: Arguments, schedule: BatchSchedule) -> LearningRate:
        """Convert flags in steps to samples with the final batch size, as Megatron does."""
        final = schedule.segments[-1][1]
        decay = args.train_samples if args.train_samples is not None else (args.train_iters or 0) * final
        warmup = args.lr_warmup_iters * final
        if args.lr_warmup_fraction is not None:
            warmup = int(args.lr_warmup_fraction * decay)
        return cls(
            style=args.lr_decay_style,
            highest=args.lr,
            lowest=args.min_lr,
            warmup_samples=warmup,
            decay_samples=max(decay, warmup + 1),
        )

    def at(self, samples: int) -> float:
        """The rate of the step that begins after ``samples`` samples; 0 at the first step of a warm-up."""
        if self.warmup_samples and samples <= self.warmup_samples:
            return self.highest * samples / self.warmup_samples
        if self.style == "constant":
            return self.highest
        if samples > self.decay_samples:
            return self.lowest
        done = (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        left = 1 - done if self.style == "linear" else 0.5 * (math.cos(math.pi * done) + 1)
        return self.lowest + left * (self.highest - self.lowest)


#: Weight decay of matrices.
WEIGHT_DECAY = 0.01
#: DeepSpeed's own default, in elements: 2 GB per rank in float32, for a model of any size.
_BUCKET = 500_000_000


def deepspeed_config(args: Arguments, *, global_batch_size: int, num_parameters: int) -> dict[str, Any]:
    """Build the config for ``deepspeed.initialize``.

    Args:
        args: the flags.
        global_batch_size: samples of the first step.
        num_parameters: of this rank's model; no buffer needs to be larger.
    """
    bucket = min(_BUCKET, max(num_parameters, 1))
    config: dict[str, Any] = {
        "train_batch_size": global_batch_size,
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": args.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 40,
    }
    if args.bf16:
        config["bf16"] = {"enabled": True}
    return config


def build_optimizer(args: Arguments, model: torch.nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """AdamW; with weight decay for matrices, but not for vectors (biases, norms), as in Megatron."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    betas = (0.9, args.adam_beta2)
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=args.lr, betas=betas, fused=device.type == "cuda")
