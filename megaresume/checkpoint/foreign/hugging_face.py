"""Hugging Face's Trainer, and LLaMA-Factory on top of it: ``checkpoint-10/``, without a pointer.

    model.safetensors, or model-00001-of-00002.safetensors ... and model.safetensors.index.json, which lists them
        adapters: adapter_model.safetensors; FSDP: pytorch_model_fsdp_0/; older: pytorch_model.bin
    optimizer.pt  scheduler.pt  scaler.pt  rng_state.pth, or rng_state_R.pth for each rank
    global_step10/  latest               with DeepSpeed: instead of optimizer.pt, and under ZeRO 3 of the model
    trainer_state.json                   written last by rank 0, so that a killed save has none

As in ``transformers/trainer.py`` (``_save_checkpoint``). Its own ``get_last_checkpoint`` looks at names alone.
"""

from __future__ import annotations

import re
from pathlib import Path

from megaresume.checkpoint.files import read_file
from megaresume.checkpoint.foreign import deepspeed
from megaresume.checkpoint.foreign.base import Layout, Look, file_problems, read_json, subdirectories
from megaresume.checkpoint.foreign.distributed import distributed_problems
from megaresume.checkpoint.paths import LATEST

STATE = "trainer_state.json"

_SHARD = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.(safetensors|bin)")
_RNG = re.compile(r"rng_state_([0-9]+)\.pth")
_FSDP = re.compile(r"(pytorch_model_fsdp|optimizer)_([0-9]+)")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")


def look(directory: Path, number: int | None = None) -> Look:
    """Look at one checkpoint directory. Raises OSError."""
    names = {entry.name for entry in directory.iterdir()}
    found = [*file_problems(directory), *_state(directory, number), *missing_shards(directory)]
    tags = [name for name in subdirectories(directory) if deepspeed.DEEPSPEED.number(name) is not None]
    is_deepspeed = bool(tags) or LATEST in names
    if is_deepspeed:
        found += _deepspeed(directory, tags)
    sharded = [name for name in subdirectories(directory) if _FSDP.fullmatch(name)]
    for name in sharded:
        found += [f"{name}/{problem}" for problem in distributed_problems(directory / name)]
    shards = any(_SHARD.fullmatch(name) for name in names)
    fsdp = any(name.startswith("pytorch_model_fsdp") for name in names)
    inside = [n for n in subdirectories(directory) if any((directory / n / w).exists() for w in _WEIGHTS)]
    if not (shards or fsdp or inside or is_deepspeed or names.intersection(_WEIGHTS)):
        found.append("there are no weights in it")
    num_ranks = max([deepspeed.ranks_of(directory / tag)[0] or 1 for tag in tags], default=1)
    problems, notes = _training(names, sharded, is_deepspeed, num_ranks)
    return Look(problems=(*found, *problems), notes=tuple(notes))


def _state(directory: Path, number: int | None) -> list[str]:
    try:
        state = read_json(directory / STATE)
    except FileNotFoundError:
        return [f"{STATE} is missing: it is written last"]
    except ValueError:
        return []  # `file_problems` says so
    step = state.get("global_step") if isinstance(state, dict) else None
    if number is not None and step != number:
        return [f"{STATE} is of step {step}"]
    return []


def _training(names: set[str], sharded: list[str], is_deepspeed: bool, num_ranks: int) -> tuple[list[str], list[str]]:
    """(what is missing of optimizer, schedule and random states, what to know)."""
    optimizer = (
        is_deepspeed
        or bool(names.intersection(_OPTIMIZERS))
        or any(name.startswith("optimizer_") for name in sharded)
        or any(re.fullmatch(r"rank[0-9]+-of-[0-9]+-optimizer\.pt", name) for name in names)
    )
    scheduler = is_deepspeed or "scheduler.pt" in names
    ranks = {int(match[1]) for name in names if (match := _RNG.fullmatch(name))}
    random = "rng_state.pth" in names or bool(ranks)
    if not (optimizer or random or "scheduler.pt" in names):
        return [], ["there is no optimizer state in it (save_only_model): a resume begins with a new optimizer"]
    lacking = {"optimizer.pt": optimizer, "scheduler.pt": scheduler, "rng_state.pth": random}
    found = [f"{name} is missing" for name, there in lacking.items() if not there]
    if ranks:
        # One rank alone writes rng_state.pth: a number in the name tells of at least two.
        wanted = max(max(ranks) + 1, 2, num_ranks)
        found += [f"rng_state_{rank}.pth is missing" for rank in range(wanted) if rank not in ranks]
    return found, []


def _deepspeed(directory: Path, tags: list[str]) -> list[str]:
    try:
        tag = read_file(directory / LATEST).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return [f"{LATEST} is missing, which names {' or '.join(tags)}"]
    if not tag:
        return [f"{LATEST} is empty"]
    if tag not in subdirectories(directory):
        return [f"{LATEST} names {tag!r}, which is not there"]
    # Its files were looked at already, with those of the whole directory.
    seen = set(file_problems(directory / tag))
    return [f"{tag}/{problem}" for problem in deepspeed.look(directory / tag).problems if problem not in seen]


def missing_shards(directory: Path) -> list[str]:
    """Shards of weights that an index or their own names tell of, and that are not there. Raises OSError."""
    if not directory.is_dir():
        return []
    names = sorted(entry.name for entry in directory.iterdir())
    wanted: set[str] = set()
    found = []
    for name in names:
        if name.endswith((".safetensors.index.json", ".bin.index.json")):
            try:
                index = read_json(directory / name)
                files = index["weight_map"].values()  # type: ignore[index]
                wanted.update(file for file in files if isinstance(file, str) and "/" not in file)
            except (ValueError, KeyError, TypeError, AttributeError):
                found.append(f"{name} lists no weights")
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    for match in shards:
        base, total, kind = match[1], int(match[3]), match[4]
        wanted.update(f"{base}-{i:05d}-of-{match[3]}.{kind}" for i in range(1, min(total, 100_000) + 1))
        if f"{base}.{kind}.index.json" not in names:
            found.append(f"{base}.{kind}.index.json is missing")
    found += [f"{name} is missing" for name in sorted(wanted.difference(names))]
    return list(dict.fromkeys(found))


HUGGING_FACE = Layout(
    name="hugging-face",
    title="Hugging Face Trainer, LLaMA-Factory",
    pattern=re.compile(r"checkpoint-([0-9]{1,18})"),
    pointer=None,
    pointer_commits=False,
    managed=True,
    others=lambda root: [],
    look=look,
)
