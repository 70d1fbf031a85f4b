"""DeepSpeed: ``global_step10/`` or a tag of the user's own, and the pointer ``latest``.

    mp_rank_MM_model_states.pt                          one for each model-parallel rank (ZeRO 0 to 2)
    zero_pp_rank_R_mp_rank_MM_model_states.pt           one for each rank (ZeRO 3)
    [bf16_]zero_pp_rank_R_mp_rank_MM_optim_states.pt    one for each rank (ZeRO 1 to 3)
    layer_LL-model_MM-model_states.pt                   pipelines
    layer_L_expert_E_mp_rank_MM_model_states.pt         experts

As in ``deepspeed/runtime/engine.py`` (``_get_zero_ckpt_name``, ``_save_checkpoint``). How many ranks there were is in
no name; the model states say so (``dp_world_size``). ``latest`` is moved before all ranks are done: it proves nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
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
from megaresume.checkpoint.paths import LATEST, RECORDS_DIR

_MODEL = re.compile(r"mp_rank_([0-9]+)_model_states\.pt")
_MODEL_3 = re.compile(r"zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_?optim_states\.pt")
_EXPERT = re.compile(r"layer_([0-9]+)_expert_([0-9]+)_mp_rank_[0-9]+_model_states\.pt")
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt")


def look(directory: Path, _: int | None = None) -> Look:
    """Look at one tag directory. Raises OSError."""
    names = _names(directory)
    found = file_problems(directory)
    models = [match for name in names if (match := _MODEL.fullmatch(name))]
    models_3 = [match for name in names if (match := _MODEL_3.fullmatch(name))]
    optimizers = [match for name in names if (match := _OPTIMIZER.fullmatch(name))]
    if not models and not models_3:
        return Look(problems=(*found, "there is no *_model_states.pt in it"))
    facts = _facts(directory, names)
    dp, mp = _count(value_after(facts, "dp_world_size")), _count(value_after(facts, "mp_world_size"))
    mp = mp or 1 + max(int(match[match.re.groups]) for match in models + models_3)
    if models:
        there = {int(match[1]) for match in models}
        found += [f"mp_rank_{rank:02d}_model_states.pt is missing" for rank in range(mp) if rank not in there]
    shards = _count(value_after(facts, "mics_shard_size")) or dp
    if models_3:
        found += _missing(models_3, shards, mp, "zero_pp_rank_{}_mp_rank_{:02d}_model_states.pt")
    if optimizers:
        prefix = optimizers[0][0].split("zero_pp_rank_")[0]
        found += _missing(optimizers, shards, mp, prefix + "zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt")
    elif not any(_EXPERT_OPTIMIZER.fullmatch(name) for name in names) and (
        models_3 or value_after(facts, "optimizer") is None
    ):
        found.append("there is no *_optim_states.pt, and no optimizer state in the model states either")
    found += _experts(names)
    return Look(problems=tuple(found))


def ranks_of(directory: Path) -> tuple[int | None, int | None]:
    """How a tag directory was saved: (data-parallel ranks, ZeRO stage); None: not said. Raises OSError."""
    names = _names(directory)
    facts = _facts(directory, names)
    stage: int | None = None
    if facts is not None and "zero_optimization" in facts:
        after = facts[facts.index("zero_optimization") :]
        stage = _count(value_after(after, "stage"), at_least=0)
    if stage is None and any(_MODEL_3.fullmatch(name) for name in names):
        stage = 3
    return _count(value_after(facts, "dp_world_size")), stage


def _names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def _is_model(name: str) -> bool:
    return bool(_MODEL.fullmatch(name) or _MODEL_3.fullmatch(name))


def _facts(directory: Path, names: list[str]) -> list[Word] | None:
    """The words of the first model states that can be read."""
    return next((facts for n in names if _is_model(n) and (facts := archive_words(directory / n)) is not None), None)


def _count(word: Word, at_least: int = 1) -> int | None:
    return word if type(word) is int and word >= at_least else None


def _missing(files: list[re.Match[str]], shards: int | None, mp: int, pattern: str) -> list[str]:
    there = {(int(match[1]), int(match[2])) for match in files}
    shards = shards or 1 + max(rank for rank, _ in there)
    wanted = [(rank, part) for part in range(mp) for rank in range(shards)]
    return [f"{pattern.format(*key)} is missing" for key in wanted if key not in there]


def _experts(names: list[str]) -> list[str]:
    layers: dict[int, set[int]] = defaultdict(set)
    for name in names:
        if match := _EXPERT.fullmatch(name):
            layers[int(match[1])].add(int(match[2]))
    return [
        f"expert {expert} of layer {layer} is missing"
        for layer, experts in sorted(layers.items())
        for expert in range(max(experts))
        if expert not in experts
    ]


def is_tag_directory(directory: Path) -> bool:
    """Whether its files are those of a tag directory, whatever its name. Raises OSError."""
    return any(map(_is_model, _names(directory)))


def _others(root: Path) -> list[str]:
    """Tags of the user's own: directories with model states, but for what was converted from another tag."""
    usual = DEEPSPEED.pattern
    names = [name for name in subdirectories(root) if not usual.fullmatch(name) and name != RECORDS_DIR]
    return [name for name in names if not name.endswith("_universal") and is_tag_directory(root / name)]


def global_steps(directory: Path) -> int | None:
    """The iteration that the model states tell: for tags whose name does not. Raises OSError."""
    return _count(value_after(_facts(directory, _names(directory)), "global_steps"), at_least=0)


DEEPSPEED = Layout(
    name="deepspeed",
    title="DeepSpeed",
    pattern=re.compile(r"global_step([0-9]{1,18})"),
    pointer=LATEST,
    pointer_commits=False,
    managed=True,
    others=_others,
    look=look,
    number_inside=global_steps,
)
