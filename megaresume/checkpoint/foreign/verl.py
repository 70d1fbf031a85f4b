"""VeRL: ``global_step_10/`` with a directory for each role, and the tracker ``latest_checkpointed_iteration.txt``.

    actor/  critic/      FSDP: model_, optim_, extra_state_world_size_W_rank_R.pt, fsdp_config.json
                         Megatron: dist_ckpt/, a distributed checkpoint
                         both: huggingface/, configuration and tokenizer, and weights where asked for
    data.pt              the loader of prompts

As in ``verl/utils/checkpoint/``; its trainer of supervised runs writes the same without roles, and ``data_R.pt``. The
tracker is written last.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from megaresume.checkpoint.foreign.base import Layout, Look, file_problems, read_json, subdirectories
from megaresume.checkpoint.foreign.distributed import is_distributed, megatron_dist_problems
from megaresume.checkpoint.foreign.hugging_face import missing_shards
from megaresume.checkpoint.paths import TRACKER

_FILE = re.compile(r"(model|optim|extra_state)_world_size_([0-9]+)_rank_([0-9]+)\.pt")


def look(directory: Path, _: int | None = None) -> Look:
    """Look at one checkpoint directory. Raises OSError."""
    found, notes = file_problems(directory), list[str]()
    roles = [name for name in subdirectories(directory) if _is_role(directory / name)]
    parts = [(f"{name}/", directory / name) for name in roles]
    if not roles:
        if not _is_role(directory):
            return Look(problems=(*found, "there is neither actor nor critic in it, nor a model of its own"))
        parts = [("", directory)]
    for prefix, part in parts:
        problems, kinds = _role(part)
        found += [f"{prefix}{problem}" for problem in problems]
        lacking = [name for name in ("optim", "extra_state") if kinds and name not in kinds]
        if lacking:
            notes.append(f"{prefix or directory.name} has no {' and no '.join(lacking)}: save_contents leaves it out")
    data = sorted(directory.glob("data*.pt"))
    if not data and roles:
        found.append("data.pt is missing: the prompts would begin anew")
    elif not data:
        notes.append("there is no data_0.pt: the data begins anew")
    return Look(problems=tuple(found), notes=tuple(notes))


def _is_role(directory: Path) -> bool:
    names = [entry.name for entry in directory.iterdir()]
    return any(_FILE.fullmatch(name) or name in ("dist_ckpt", "huggingface") for name in names)


def _role(directory: Path) -> tuple[list[str], set[str]]:
    """(what is wrong, kinds of files)."""
    found: list[str] = []
    ranks: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for entry in directory.iterdir():
        if match := _FILE.fullmatch(entry.name):
            ranks[match[1]][int(match[2])].add(int(match[3]))
    sizes = {size for sizes in ranks.values() for size in sizes}
    if len(sizes) > 1:
        found.append(f"files of saves with {' and '.join(map(str, sorted(sizes)))} ranks are mixed")
    for kind, by_size in sorted(ranks.items()):
        for size, there in sorted(by_size.items()):
            missing = [rank for rank in range(size) if rank not in there]
            found += [f"{kind}_world_size_{size}_rank_{rank}.pt is missing" for rank in missing]
    if ranks and "model" not in ranks:
        found.append(f"there is no model_world_size_{min(sizes)}_rank_0.pt")
    sharded = directory / "dist_ckpt"
    if sharded.is_dir():
        problems = megatron_dist_problems(sharded) if is_distributed(sharded) else ["is empty"]
        found += [f"dist_ckpt: {problem}" for problem in problems]
    found += [f"huggingface/{problem}" for problem in missing_shards(directory / "huggingface")]
    if not ranks and not sharded.is_dir() and not list((directory / "huggingface").glob("*.safetensors")):
        found.append("there is no model in it")
    found += _config(directory, sizes)
    return found, set(ranks)


def _config(directory: Path, sizes: set[int]) -> list[str]:
    try:
        config = read_json(directory / "fsdp_config.json")
    except (FileNotFoundError, ValueError):
        return []  # Megatron's, or older; one that does not parse is named among the files
    size = config.get("world_size") if isinstance(config, dict) else None
    wrong = isinstance(size, int) and bool(sizes) and size not in sizes
    return [f"fsdp_config.json is of {size} ranks, the files are of {min(sizes)}"] if wrong else []


VERL = Layout(
    name="verl",
    title="VeRL",
    pattern=re.compile(r"global_step_([0-9]{1,18})"),
    pointer=TRACKER,
    pointer_commits=True,
    managed=False,
    others=lambda root: [],
    look=look,
)
