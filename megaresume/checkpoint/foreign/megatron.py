"""Megatron-LM: ``iter_0000010/`` or ``release/``, and the tracker ``latest_checkpointed_iteration.txt``.

    torch           mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt, and distrib_optim.pt with the distributed optimizer
    torch_dist      metadata.json  .metadata  common.pt  __R_F.distcp
    torch_dcp, fsdp_dtensor         .metadata            __R_F.distcp

As in ``megatron/training/checkpointing.py`` (``get_checkpoint_name``, ``_get_checkpoint_format``). The tracker is
written when every rank is done, so that a directory newer than it was never finished.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

from megaresume.checkpoint.foreign.base import (
    Layout,
    Look,
    Word,
    archive_words,
    file_problems,
    subdirectories,
    value_after,
)
from megaresume.checkpoint.foreign.distributed import (
    CONFIG,
    METADATA,
    distributed_problems,
    has_common_state,
    is_distributed,
    megatron_dist_problems,
)
from megaresume.checkpoint.paths import TRACKER

RELEASE = "release"
MODEL = "model_optim_rng.pt"
OPTIMIZER = "distrib_optim.pt"

_RANK = re.compile(r"mp_rank_([0-9]{2,})(?:_([0-9]{3,}))?(?:_([0-9]{3,}))?")


def look(directory: Path, _: int | None = None) -> Look:
    """Look at one checkpoint directory. Raises OSError."""
    found = file_problems(directory)
    ranks = {name: match for name in subdirectories(directory) if (match := _RANK.fullmatch(name))}
    if (directory / CONFIG).exists() or has_common_state(directory):
        found += megatron_dist_problems(directory)
    elif ranks:
        found += _torch_problems(directory, ranks)
    elif (directory / METADATA).exists():
        found += distributed_problems(directory)
    elif is_distributed(directory):
        found.append(f"neither {CONFIG} nor {METADATA} is there: they are written when every rank is done")
    else:
        found.append(f"there is nothing in it that a checkpoint of Megatron-LM has ({CONFIG}, {METADATA}, mp_rank_*)")
    return Look(problems=tuple(found))


def _torch_problems(directory: Path, ranks: dict[str, re.Match[str]]) -> list[str]:
    args = None
    for name in sorted(ranks):
        if (directory / name / MODEL).exists() and (args := archive_words(directory / name / MODEL)) is not None:
            break
    expected = _expected_ranks(args) or _grid(ranks)
    found = [f"{name} is missing" for name in expected if name not in ranks]
    there = [name for name in expected if name in ranks]
    found += [f"{name}/{MODEL} is missing" for name in there if not (directory / name / MODEL).exists()]
    lacking = [name for name in there if not (directory / name / OPTIMIZER).exists()]
    distributed = value_after(args, "use_distributed_optimizer") is True
    saved = value_after(args, "no_save_optim") is not True
    if lacking and (len(lacking) < len(there) or (distributed and saved)):
        found += [f"{name}/{OPTIMIZER} is missing" for name in lacking]
    return found


def _expected_ranks(args: list[Word] | None) -> list[str]:
    """From the arguments that every file holds; none where they are not there."""
    sizes = [value_after(args, f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline", "expert")]
    tensor, pipeline, expert = (size if isinstance(size, int) else None for size in sizes)
    if tensor is None or pipeline is None:
        return []
    names = []
    for t, p, e in product(range(tensor), range(pipeline), range(expert or 1)):
        name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pipeline > 1 else "") + (f"_{e:03d}" if (expert or 1) > 1 else "")
        names.append(name)
    return names


def _grid(ranks: dict[str, re.Match[str]]) -> list[str]:
    """Every combination of the indices that occur, from 0 up: what is missing inside of it was lost."""
    indices = [[int(part) for part in match.groups() if part is not None] for match in ranks.values()]
    width = max(map(len, indices))
    sizes = [max(row[i] for row in indices if len(row) > i) + 1 for i in range(width)]
    return [
        f"mp_rank_{row[0]:02d}" + "".join(f"_{index:03d}" for index in row[1:]) for row in product(*map(range, sizes))
    ]


MEGATRON = Layout(
    name="megatron",
    title="Megatron-LM",
    pattern=re.compile(r"iter_([0-9]{7,18})"),
    pointer=TRACKER,
    pointer_commits=True,
    managed=True,
    others=lambda root: [RELEASE] if (root / RELEASE).is_dir() else [],
    look=look,
)
