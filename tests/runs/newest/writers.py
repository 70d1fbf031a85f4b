"""Run on 2 ranks by conftest.py: every layout, written by the library that owns it, as small as it can be.

usage: writers.py DIRECTORY; at each place the checkpoints of iterations 2 and 4.
"""

from __future__ import annotations

import os
import sys
import warnings
from argparse import Namespace
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
warnings.simplefilter("ignore")

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402

torch.set_num_threads(1)
torch.cuda.synchronize = lambda *_: None  # made by megatron-core whatever the tensors lie on
torch.cuda.current_device = lambda: torch.device("cpu")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.utils.logger.setLevel("ERROR")

ROOT = Path(sys.argv[1])
STEPS = (2, 4)


def engine(stage: int, **more: object) -> deepspeed.DeepSpeedEngine:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000},
        "steps_per_print": 1 << 40,
        **more,
    }
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    return deepspeed.initialize(model=model, config=config)[0]


def step(one: deepspeed.DeepSpeedEngine, until: int) -> None:
    while one.global_steps < until:
        one.backward(one(torch.ones(1, 4, dtype=next(one.module.parameters()).dtype)).sum())
        one.step()


def write_deepspeed() -> None:
    for stage in (0, 1, 2, 3):
        one = engine(stage)
        for until in STEPS:
            step(one, until)
            one.save_checkpoint(str(ROOT / f"deepspeed_{stage}"))
            if stage == 2:
                one.save_checkpoint(str(ROOT / "deepspeed_tags"), tag={2: "first", 4: "best"}[until])
                write_hugging_face(ROOT / "hugging_face_deepspeed", until, one)
    one = engine(1, bf16={"enabled": True})
    for until in STEPS:
        step(one, until)
        one.save_checkpoint(str(ROOT / "deepspeed_bf16"))


def write_megatron() -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    rank = dist.get_rank()
    for number in STEPS:
        for place in ("megatron_torch_dist/iter_{:07d}", "verl_megatron/global_step_{}/actor/dist_ckpt"):
            path = ROOT / place.format(number)
            path.mkdir(parents=True, exist_ok=True)
            dist.barrier()
            weights = ShardedTensor.from_rank_offsets("w", torch.full((64,), float(rank)), (0, rank, 2))
            dist_checkpointing.save({"model": {"w": weights}, "iteration": number, "args": Namespace(a=1)}, str(path))
        # torch_dcp, and fsdp_dtensor in the same form
        dcp.save({"w": torch.ones(64)}, checkpoint_id=str(ROOT / "megatron_dcp" / f"iter_{number:07d}"))
        args = Namespace(
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=1,
            expert_model_parallel_size=1,
            use_distributed_optimizer=True,
            no_save_optim=None,
        )
        path = ROOT / "megatron_torch" / f"iter_{number:07d}" / f"mp_rank_{rank:02d}"
        path.mkdir(parents=True)
        torch.save({"args": args, "iteration": number, "model": {"w": torch.ones(8)}}, path / "model_optim_rng.pt")
        torch.save({"optimizer": torch.ones(8)}, path / "distrib_optim.pt")
        dist.barrier()
        if rank == 0:
            torch.save({}, ROOT / "verl_megatron" / f"global_step_{number}" / "data.pt")
            for place in ("megatron_torch_dist", "megatron_dcp", "megatron_torch", "verl_megatron"):
                (ROOT / place / "latest_checkpointed_iteration.txt").write_text(str(number))


def write_verl() -> None:
    """As verl/utils/checkpoint/fsdp_checkpoint_manager.py does."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for number in STEPS:
        for role in ("actor", "critic"):
            path = ROOT / "verl" / f"global_step_{number}" / role
            path.mkdir(parents=True, exist_ok=True)
            for kind in ("model", "optim", "extra_state"):
                torch.save({"w": torch.ones(8)}, path / f"{kind}_world_size_{size}_rank_{rank}.pt")
            if rank == 0:
                (path / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')
                (path / "huggingface").mkdir()
                (path / "huggingface" / "config.json").write_text("{}")
        dist.barrier()
        if rank == 0:
            torch.save({"_snapshot": 3}, ROOT / "verl" / f"global_step_{number}" / "data.pt")
            (ROOT / "verl" / "latest_checkpointed_iteration.txt").write_text(str(number))


def write_hugging_face(root: Path, number: int, one: deepspeed.DeepSpeedEngine | None) -> None:
    """As transformers/trainer.py ``_save_checkpoint`` does, with the library's own writers."""
    path = root / f"checkpoint-{number}"
    rank = dist.get_rank()
    if rank == 0:
        _write_model(path, with_optimizer=one is None)
    dist.barrier()
    if one is not None:
        one.save_checkpoint(str(path))
    torch.save({"cpu": torch.get_rng_state()}, path / f"rng_state_{rank}.pth")
    if rank == 0:
        from transformers.trainer_callback import TrainerState

        state = TrainerState()
        state.global_step = number
        state.save_to_json(str(path / "trainer_state.json"))
    dist.barrier()


def _write_model(path: Path, *, with_optimizer: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM  # on rank 0 alone: it takes seconds

    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**tiny, vocab_size=64))
    model.save_pretrained(path, max_shard_size="10KB")
    if with_optimizer:
        optimizer = torch.optim.AdamW(model.parameters())
        torch.save(optimizer.state_dict(), path / "optimizer.pt")
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        torch.save(schedule.state_dict(), path / "scheduler.pt")


if __name__ == "__main__":
    deepspeed.init_distributed("gloo", verbose=False)
    write_deepspeed()
    write_megatron()
    write_verl()
    for number in STEPS:
        write_hugging_face(ROOT / "hugging_face", number, None)
    dist.barrier()
    dist.destroy_process_group()
