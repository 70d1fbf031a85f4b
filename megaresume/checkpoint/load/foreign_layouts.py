"""The checkpoint layouts of other programs.

DeepSpeed: ``global_step10/`` or a custom tag, and the pointer ``latest``.

    mp_rank_MM_model_states.pt                          one per model-parallel rank (ZeRO 0 to 2)
    zero_pp_rank_R_mp_rank_MM_model_states.pt           one per rank (ZeRO 3)
    [bf16_]zero_pp_rank_R_mp_rank_MM_optim_states.pt    one per rank (ZeRO 1 to 3)
    layer_LL-model_MM-model_states.pt                   pipelines
    layer_L_expert_E_mp_rank_MM_model_states.pt         experts

As in ``deepspeed/runtime/engine.py`` (``_get_zero_ckpt_name``, ``_save_checkpoint``). The number of ranks is in no
file name, but in the model states (``dp_world_size``). ``latest`` is moved before all ranks are done: it proves
nothing.

Megatron-LM: ``iter_0000010/`` or ``release/``, and the tracker ``latest_checkpointed_iteration.txt``.

    torch           mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt, and distrib_optim.pt with the distributed optimizer
    torch_dist      metadata.json  .metadata  common.pt  __R_F.distcp
    torch_dcp, fsdp_dtensor         .metadata            __R_F.distcp

As in ``megatron/training/checkpointing.py`` (``get_checkpoint_name``, ``_get_checkpoint_format``). The tracker is
written when every rank is done, so a newer directory was never finished.

Hugging Face's Trainer, and LLaMA-Factory, which uses it: ``checkpoint-10/``, without a pointer.

    model.safetensors, or model-00001-of-00002.safetensors ... and model.safetensors.index.json, which lists them
        adapters: adapter_model.safetensors; FSDP: pytorch_model_fsdp_0/; older: pytorch_model.bin
    optimizer.pt  scheduler.pt  scaler.pt  rng_state.pth, or rng_state_R.pth for each rank
    global_step10/  latest               with DeepSpeed: instead of optimizer.pt, and under ZeRO 3 of the model
    trainer_state.json                   written last by rank 0, so a killed save has none

As in ``transformers/trainer.py`` (``_save_checkpoint``). Its own ``get_last_checkpoint`` only looks at names.

VeRL: ``global_step_10/`` with a directory for each role, and the tracker ``latest_checkpointed_iteration.txt``.

    actor/  critic/      FSDP: model_, optim_, extra_state_world_size_W_rank_R.pt, fsdp_config.json
                         Megatron: dist_ckpt/, a distributed checkpoint
                         both: huggingface/, configuration and tokenizer, and weights if configured
    data.pt              the loader of prompts

As in ``verl/utils/checkpoint/``; its trainer for supervised runs writes the same without roles, and ``data_R.pt``. The
tracker is written last.
"""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import product
from pathlib import Path

from megaresume.checkpoint.load.foreign import (
    CONFIG,
    METADATA,
    Layout,
    Look,
    Word,
    archive_words,
    distributed_problems,
    file_problems,
    has_common_state,
    is_distributed,
    megatron_dist_problems,
    read_json,
    subdirectories,
    value_after,
)
from megaresume.checkpoint.records.names import LATEST, RECORDS_DIR, TRACKER
from megaresume.files import read_file

_MODEL = re.compile(r"mp_rank_([0-9]+)_model_states\.pt")
_MODEL_3 = re.compile(r"zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_?optim_states\.pt")
_EXPERT = re.compile(r"layer_([0-9]+)_expert_([0-9]+)_mp_rank_[0-9]+_model_states\.pt")
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt")


def _look_at_deepspeed(directory: Path, _: int | None = None) -> Look:
    """Examine one tag directory. Raises OSError."""
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
    """The layout when a tag directory was saved: (data-parallel ranks, ZeRO stage); None if unknown. Raises OSError."""
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
    """The words of the first readable model states."""
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
    """Whether its files are those of a tag directory, whatever its name is. Raises OSError."""
    return any(map(_is_model, _names(directory)))


def _others(root: Path) -> list[str]:
    """Custom tags: directories with model states, except those converted from another tag."""
    usual = DEEPSPEED.pattern
    names = [name for name in subdirectories(root) if not usual.fullmatch(name) and name != RECORDS_DIR]
    return [name for name in names if not name.endswith("_universal") and is_tag_directory(root / name)]


def global_steps(directory: Path) -> int | None:
    """The iteration in the model states, for tags whose name has none. Raises OSError."""
    return _count(value_after(_facts(directory, _names(directory)), "global_steps"), at_least=0)


DEEPSPEED = Layout(
    name="deepspeed",
    title="DeepSpeed",
    pattern=re.compile(r"global_step([0-9]{1,18})"),
    pointer=LATEST,
    pointer_commits=False,
    managed=True,
    others=_others,
    look=_look_at_deepspeed,
    number_inside=global_steps,
)


RELEASE = "release"
MODEL = "model_optim_rng.pt"
OPTIMIZER = "distrib_optim.pt"

_RANK = re.compile(r"mp_rank_([0-9]{2,})(?:_([0-9]{3,}))?(?:_([0-9]{3,}))?")


def _look_at_megatron(directory: Path, _: int | None = None) -> Look:
    """Examine one checkpoint directory. Raises OSError."""
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
        found.append(f"it has none of the files of a Megatron-LM checkpoint ({CONFIG}, {METADATA}, mp_rank_*)")
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
    """Files for the ranks in the arguments that every file contains; empty without arguments."""
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
    """Every combination of the indices that occur, from 0 up; one missing within this grid was lost."""
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
    look=_look_at_megatron,
)


STATE = "trainer_state.json"

_SHARD = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.(safetensors|bin)")
_RNG = re.compile(r"rng_state_([0-9]+)\.pth")
_FSDP = re.compile(r"(pytorch_model_fsdp|optimizer)_([0-9]+)")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")


def _look_at_hugging_face(directory: Path, number: int | None = None) -> Look:
    """Examine one checkpoint directory. Raises OSError."""
    names = {entry.name for entry in directory.iterdir()}
    found = [*file_problems(directory), *_state(directory, number), *missing_shards(directory)]
    tags = [name for name in subdirectories(directory) if DEEPSPEED.number(name) is not None]
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
    num_ranks = max([ranks_of(directory / tag)[0] or 1 for tag in tags], default=1)
    problems, notes = _training(names, sharded, is_deepspeed, num_ranks)
    return Look(problems=(*found, *problems), notes=tuple(notes))


def _state(directory: Path, number: int | None) -> list[str]:
    try:
        state = read_json(directory / STATE)
    except FileNotFoundError:
        return [f"{STATE} is missing: it is written last"]
    except ValueError:
        return []  # `file_problems` reports it
    step = state.get("global_step") if isinstance(state, dict) else None
    if number is not None and step != number:
        return [f"{STATE} is from step {step}"]
    return []


def _training(names: set[str], sharded: list[str], is_deepspeed: bool, num_ranks: int) -> tuple[list[str], list[str]]:
    """(what is missing from optimizer, schedule and random states, notes)."""
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
        # A single rank writes rng_state.pth: a number in the name means at least two ranks.
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
    # Its files were already checked with those of the whole directory.
    seen = set(file_problems(directory / tag))
    return [f"{tag}/{problem}" for problem in _look_at_deepspeed(directory / tag).problems if problem not in seen]


def missing_shards(directory: Path) -> list[str]:
    """Shards of weights that an index or their own names imply, and that do not exist. Raises OSError."""
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
    look=_look_at_hugging_face,
)


_FILE = re.compile(r"(model|optim|extra_state)_world_size_([0-9]+)_rank_([0-9]+)\.pt")


def _look_at_verl(directory: Path, _: int | None = None) -> Look:
    """Examine one checkpoint directory. Raises OSError."""
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
        found.append("data.pt is missing: the prompts would start over")
    elif not data:
        notes.append("there is no data_0.pt: the data starts over")
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
        return []  # Megatron's, or older; one that does not parse is reported with the files
    size = config.get("world_size") if isinstance(config, dict) else None
    wrong = isinstance(size, int) and bool(sizes) and size not in sizes
    return [f"fsdp_config.json is for {size} ranks, the files are for {min(sizes)}"] if wrong else []


VERL = Layout(
    name="verl",
    title="VeRL",
    pattern=re.compile(r"global_step_([0-9]{1,18})"),
    pointer=TRACKER,
    pointer_commits=True,
    managed=False,
    others=lambda root: [],
    look=_look_at_verl,
)

LAYOUTS = {layout.name: layout for layout in (MEGATRON, DEEPSPEED, VERL, HUGGING_FACE)}
