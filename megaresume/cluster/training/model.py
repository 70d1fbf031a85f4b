"""megatron-core's GPTModel, with attention that never crosses a document.

The attention is put into the layer spec's ``core_attention``, a public extension point of megatron-core: torch's
scaled dot product attention with an explicit mask. It runs on CPU and GPU (there in fused kernels).

The loss, minimised and reported, is the same whatever the data-parallel and the micro-batch size.

Minimised: the sum of the token losses of a global batch, divided by its G * S places. A mean over trained tokens of
each micro-batch (what many programs do) weighs a token by how full the *others* of its micro-batch are, and so
changes with the layout; places are constant, so DeepSpeed's averaging over micro-steps and ranks is exact. With
packed samples nearly all places are trained tokens. Adam does not feel the scale.

Reported: the sum of the token losses of the global batch, divided by its number of trained tokens, summed in float64.

The learning rate is a pure function of trained samples: nothing to save, nothing to restore. The shapes are
Megatron-LM's (megatron.core.optimizer_param_scheduler), which counts in samples as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from megaresume.batches.batch import Batch, image_places
from megaresume.cluster.training.launch import Arguments, DecayStyle
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.errors import SetupError, UsageError


class ModelParallelUnit:
    """DeepSpeed's ``mpu``: `megatron.core.parallel_state`, and the names that it no longer has."""

    def __getattr__(self, name: str) -> Any:
        return getattr(parallel_state, name)

    def get_model_parallel_world_size(self) -> int:
        """Ranks that share one model: tensor times pipeline parallel."""
        return int(
            parallel_state.get_tensor_model_parallel_world_size()
            * parallel_state.get_pipeline_model_parallel_world_size()
        )

    def get_model_parallel_rank(self) -> int:
        """The rank of this process among the model-parallel ones."""
        return dist.get_rank(parallel_state.get_model_parallel_group())


def loss_to_minimise(token_losses: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Sum of the counted token losses of a micro-batch over its places.

    Args:
        token_losses: float[m, S].
        loss_mask: float32[m, S], 1 where the label counts.

    Returns:
        float32 scalar.
    """
    return (token_losses.float() * loss_mask).sum() / loss_mask.numel()


class LossMeter:
    """Sums of token losses and of trained tokens, over micro-batches and then over data-parallel ranks."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, token_losses: torch.Tensor, loss_mask: torch.Tensor) -> None:
        """Count one micro-batch: float[m, S] each."""
        losses = (token_losses.detach().double() * loss_mask).sum()
        self._sums[0] += losses
        self._sums[1] += loss_mask.sum()

    def reduce(self, group: dist.ProcessGroup | None) -> tuple[float, int]:
        """Add up over the ranks of a group (the data-parallel ranks).

        Returns:
            loss per trained token, and the number of trained tokens.
        """
        dist.all_reduce(self._sums, group=group)
        total, tokens = self._sums.tolist()
        return total / max(tokens, 1.0), int(tokens)


def document_mask(position_ids: torch.Tensor) -> torch.Tensor:
    """The mask of attention that is not allowed: to later tokens, and to other documents.

    Args:
        position_ids: int64[m, S], from 0 in every segment, so that a segment begins where they are 0.

    Returns:
        bool[m, 1, S, S], True where attention is not allowed (Megatron's convention).
    """
    # segments: int64[m, S], the number of the segment that each token is in.
    segments = (position_ids == 0).cumsum(dim=1)
    other = segments[:, :, None] != segments[:, None, :]
    seq_length = position_ids.shape[1]
    later = torch.ones(seq_length, seq_length, dtype=torch.bool, device=position_ids.device).triu(diagonal=1)
    return (other | later)[:, None]


class DocumentAttention(MegatronModule):  # type: ignore[misc,unused-ignore]
    """Core attention that obeys the mask it is given, whatever the layer's mask type says."""

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
        """Attend.

        Args:
            query: [S, m, heads, width]; key and value: [S, m, groups, width].
            attention_mask: bool[m, 1, S, S], True where attention is not allowed.

        Returns:
            [S, m, heads * width].
        """
        seq_length, batch, heads, width = query.shape
        # q, k, v: [m, heads, S, width]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        attended = torch.nn.functional.scaled_dot_product_attention(
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
    """Rows of the embedding table: divisible, as Megatron pads it."""
    multiple = 128 * args.tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple


def build_model(args: Arguments, *, vocab_size: int, seq_length: int, device: torch.device) -> GPTModel:
    """Build the model of this rank; the weights follow from ``args.seed``, whatever the data-parallel size.

    Args:
        args: the flags.
        vocab_size: token ids, not padded.
        seq_length: tokens a sample.
        device: where it will train; on a CPU it is initialised there as well.
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
        # These fusions need extensions that are not everywhere; DeepSpeed owns the gradients besides.
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
    """Warm-up and decay; all positions in samples."""

    style: DecayStyle
    highest: float
    lowest: float
    warmup_samples: int
    decay_samples: int

    @classmethod
    def from_arguments(cls, args: Arguments, schedule: BatchSchedule) -> LearningRate:
        """Flags that count steps are turned into samples with the final batch size, as Megatron does."""
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
        """The rate of the step that begins when ``samples`` samples are trained; 0 at the first step of a warm-up."""
        if self.warmup_samples and samples <= self.warmup_samples:
            return self.highest * samples / self.warmup_samples
        if self.style == "constant":
            return self.highest
        if samples > self.decay_samples:
            return self.lowest
        done = (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        left = 1 - done if self.style == "linear" else 0.5 * (math.cos(math.pi * done) + 1)
        return self.lowest + left * (self.highest - self.lowest)


#: The weight decay of matrices.
WEIGHT_DECAY = 0.01
#: DeepSpeed's own default, in elements: 2 GB a rank in float32, whatever the size of the model.
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
    """AdamW; matrices are decayed, vectors (biases, norms) are not, as in Megatron."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    betas = (0.9, args.adam_beta2)
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=args.lr, betas=betas, fused=device.type == "cuda")


# Images before a GPTModel: their features stand where the image tokens stood.
#
# tokens, position ids  -->  embedding of the language model  -->  [S, m, H]  --+-->  decoder_input  -->  GPTModel
# pixel values, grids   -->  vision encoder, projector  -->  [image tokens, H] -+   written at image_positions
#
# Every rank runs the vision encoder in every micro-batch: one without images sees a blank one, whose features are added
# with weight 0. All parameters so have gradients on all ranks, which ZeRO's collectives count on.
#
# The encoder is a small vision transformer of plain torch, with a projector after it: images of any size to features.
#
# patches float[K, F] of n images  ->  [n, longest, H], padded     attention within an image
# ->  [K, H]                      M * M neighbours side by side
# ->  projector  ->  [K / M**2, hidden size of the language model]
#
# Where a patch lies enters as sines of its row and column in units of the image's height: the same digit at another
# scale has the same place, and no image is too large for a table.


#: wavelengths of the sines: from four heights of the image to a fraction of a small patch.
_LONGEST, _SHORTEST = 8.0, 0.06


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionShape:
    """The output of an image processor, as far as the model must know it."""

    #: F: numbers of a patch, 3 * P * P.
    patch_features: int
    #: M: patches of a side of the square that becomes one token.
    merge: int
    #: P: side of the patches that tiles [k, 3, height, width] are cut into, in pixels; None if the processor has cut.
    patch_size: int | None


class _TransformerBlock(nn.Module):
    """A layer, normalised before attention and MLP."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.qkv, self.out = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)
        self.up, self.down = nn.Linear(hidden_size, 4 * hidden_size), nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        """x: [n, L, H]; allowed: bool[n, 1, 1, L], True at patches, False at padding."""
        n, length, width = x.shape
        # [3, n, heads, L, H / heads]
        q, k, v = self.qkv(self.norm_attention(x)).view(n, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.out(attended.transpose(1, 2).reshape(n, length, width))
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm_mlp(x))))
        return out


class ImageModel(nn.Module):
    """Vision transformer and projector.

    Args:
        shape: of what the image processor gives.
        num_layers, hidden_size, num_heads: of the transformer.
        output_size: hidden size of the language model.
    """

    def __init__(
        self, shape: VisionShape, *, num_layers: int, hidden_size: int, num_heads: int, output_size: int
    ) -> None:
        super().__init__()
        self.shape = shape
        self.patches = nn.Linear(shape.patch_features, hidden_size)
        self.places = nn.Linear(hidden_size, hidden_size)
        self.layers = nn.ModuleList(_TransformerBlock(hidden_size, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_size)
        merged = hidden_size * shape.merge**2
        self.projector = nn.Sequential(nn.Linear(merged, output_size), nn.GELU(), nn.Linear(output_size, output_size))

    def forward(self, patches: torch.Tensor, grids: list[tuple[int, int]]) -> torch.Tensor:
        """Encode.

        Args:
            patches: float[K, F], image by image; within one, square after square of M * M patches, squares and
                patches of a square each row by row.
            grids: rows and columns of patches of each image; their products add up to K.

        Returns:
            [K / M**2, output size], in the order of the squares.
        """
        lengths = [rows * columns for rows, columns in grids]
        places = torch.cat([_places(rows, columns, self.shape.merge) for rows, columns in grids])
        x = self.patches(patches) + self.places(_sines(places, self.places.in_features).to(patches))
        # allowed: bool[n, longest]; x: [K, H] -> [n, longest, H], padded with zeros
        counts = torch.tensor(lengths)
        allowed = (torch.arange(max(lengths))[None] < counts[:, None]).to(x.device)
        padded = x.new_zeros(*allowed.shape, x.shape[-1]).masked_scatter(allowed[..., None], x)
        for layer in self.layers:
            padded = layer(padded, allowed[:, None, None])
        x = self.norm(padded[allowed])
        features: torch.Tensor = self.projector(x.reshape(-1, x.shape[-1] * self.shape.merge**2))
        return features


def _places(rows: int, columns: int, merge: int) -> torch.Tensor:
    """The row and column of the centre of each patch, in heights of the image: float32[rows * columns, 2]."""
    grid = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1)
    squares = grid.view(rows // merge, merge, columns // merge, merge, 2).transpose(1, 2)
    return (squares.reshape(-1, 2) + 0.5) / rows


def _sines(places: torch.Tensor, width: int) -> torch.Tensor:
    """The sines and cosines of both coordinates: float32[K, width]."""
    steps = torch.arange(width // 4) / max(width // 4 - 1, 1)
    waves = 2 * math.pi / (_LONGEST * (_SHORTEST / _LONGEST) ** steps)
    angles = (places[:, :, None] * waves).flatten(1)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """The images of a micro-batch, on the device."""

    #: float32[sum k, ...]: patches [K, F], or tiles [k, 3, height, width].
    pixels: torch.Tensor
    #: int64[n, 3], on the CPU: frames, rows and columns of patches, where the processor gives patches.
    grids: torch.Tensor
    #: int64[image tokens] each: where in the batch each image token stands.
    rows: torch.Tensor
    columns: torch.Tensor

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Images:
        """Take them from a batch."""
        rows, columns = image_places(batch).nonzero(as_tuple=True)
        return cls(
            pixels=batch["pixel_values"].to(device, non_blocking=True),
            grids=batch["image_grid_thw"],
            rows=rows.to(device, non_blocking=True),
            columns=columns.to(device, non_blocking=True),
        )


def encoders_of(sources: Sequence[Any]) -> list[Any]:
    """The encoders of the image sources among these."""
    return [source.encoder for source in sources if getattr(source, "encoder", None) is not None]


def image_encoder(args: Arguments, sources: Sequence[Any]) -> Any | None:
    """The encoder of the image sources of a blend; None if the data has no images.

    Raises:
        UsageError: the data has images and the model no vision encoder, or the other way round.
    """
    encoders = encoders_of(sources)
    if encoders and args.vision_num_layers is None:
        raise UsageError(
            "the data has images, and the model has no vision encoder",
            found="an image source, and no --vision-num-layers",
            expected="a vision encoder, or data of text alone",
            action="--vision-num-layers 2 --vision-hidden-size 64 --vision-num-attention-heads 4, or larger",
        )
    if args.vision_num_layers is not None and not encoders:
        raise UsageError(
            "the data has no images for the vision encoder",
            found=f"--vision-num-layers {args.vision_num_layers}, and sources of text alone",
            expected="a source of kind webdataset, image_folder or energon in --megaresume-data",
            action="remove the --vision flags, or add the source with weight 0 for a stage to come",
        )
    return encoders[0] if encoders else None


def with_vision(args: Arguments, language: Any, encoder: Any, device: torch.device) -> VisionLanguageModel:
    """Put a vision encoder before a GPTModel; its weights follow from ``args.seed``.

    Args:
        args: the flags; those of vision are given.
        language: the GPTModel of this rank.
        encoder: of the data's image sources.
        device: where it will train.

    Raises:
        SetupError: the encoder's image processor does not fit.
    """
    torch.manual_seed(xxhash.xxh3_64_intdigest(f"vision {args.seed}".encode()) >> 1)
    assert args.vision_num_layers and args.vision_hidden_size and args.vision_num_attention_heads
    vision = ImageModel(
        vision_shape(encoder.processor, args.vision_patch_size),
        num_layers=args.vision_num_layers,
        hidden_size=args.vision_hidden_size,
        num_heads=args.vision_num_attention_heads,
        output_size=args.hidden_size,
    )
    dtype = next(language.parameters()).dtype
    return VisionLanguageModel(language, vision.to(device=device, dtype=dtype))


def vision_shape(processor: Any, patch_size: int) -> VisionShape:
    """Try an image processor, to find out what the model must know of it.

    Args:
        processor: of the encoder of the data's image sources.
        patch_size: P, for processors that give tiles.

    Raises:
        SetupError: its output does not fit this program's vision encoder.
    """
    import numpy as np
    from PIL import Image

    pixels, grid = processor(Image.new("RGB", (224, 224)), np.random.default_rng(0))
    tokens = processor.tokens_of(pixels, grid)
    if pixels.ndim == 2:
        num_patches, features, size = len(pixels), pixels.shape[1], None
    else:
        _, channels, height, width = pixels.shape
        if height % patch_size or width % patch_size:
            raise SetupError(
                "tiles do not divide into patches",
                found=f"tiles of {width} x {height} pixels, --vision-patch-size {patch_size}",
                expected="a patch size that divides both",
                action="--vision-patch-size P, with the processor's own patch_size",
            )
        num_patches = len(pixels) * (height // patch_size) * (width // patch_size)
        features, size = channels * patch_size**2, patch_size
    merge = math.isqrt(num_patches // max(tokens, 1))
    if merge**2 * tokens != num_patches:
        raise SetupError(
            "the vision encoder of this program cannot make as many tokens as the index counts",
            found=f"{tokens} tokens of {num_patches} patches",
            expected="a square of patches for every token, and no class tokens",
            cause="--vision-patch-size is not the processor's patch_size" if size else "a processor of another kind",
            action="change the flag, or prepare the index with class_tokens: 0",
        )
    return VisionShape(patch_features=features, merge=merge, patch_size=size)


class VisionLanguageModel(nn.Module):
    """A vision encoder before a GPTModel.

    Args:
        language: the GPTModel of this rank.
        vision: encoder and projector; the same weights on all tensor-parallel ranks.
    """

    def __init__(self, language: Any, vision: ImageModel) -> None:
        super().__init__()
        self.language, self.vision = language, vision

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor | None = None,
        images: Images | None = None,
    ) -> torch.Tensor:
        """Compute the model's output as GPTModel does.

        Args:
            tokens, position_ids, labels: int64[m, S].
            attention_mask: bool[m, 1, S, S], True where attention is not allowed.
            images: of the micro-batch; None or without any: a blank one stands in for gradients.

        Returns:
            float[m, S] token losses; without labels float[m, S, vocabulary] logits.
        """
        # embedded: [S, m, H]
        embedded = self.language.embedding(tokens, position_ids)
        if images is None or not len(images.rows):
            patches, grids = _blank(self.vision.shape, tokens.device)
            features = self.vision(patches.to(embedded), grids)
            embedded = embedded + 0.0 * features.sum().to(embedded)
        else:
            patches, grids = _sequences(images, self.vision.shape)
            features = self.vision(patches.to(embedded), grids)
            embedded = embedded.index_put((images.columns, images.rows), features.to(embedded))
        out: torch.Tensor = self.language(tokens, position_ids, attention_mask, decoder_input=embedded, labels=labels)
        return out


def _sequences(images: Images, shape: VisionShape) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Patches float[K, F], and rows and columns of every sequence of patches that attends to itself."""
    if images.pixels.ndim == 2:
        # One sequence a frame.
        return images.pixels, [(rows, columns) for t, rows, columns in images.grids.tolist() for _ in range(t)]
    assert shape.patch_size is not None
    tiles, size, merge = images.pixels, shape.patch_size, shape.merge
    k, channels, height, width = tiles.shape
    rows, columns = height // size, width // size
    squares = tiles.view(k, channels, rows // merge, merge, size, columns // merge, merge, size)
    # -> [k, rows / M, columns / M, M, M, channels, P, P]
    patches = squares.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, channels * size**2)
    return patches, [(rows, columns)] * k


def _blank(shape: VisionShape, device: torch.device) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """The smallest image: one token."""
    return torch.zeros(shape.merge**2, shape.patch_features, device=device), [(shape.merge, shape.merge)]
