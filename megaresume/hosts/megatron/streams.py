"""From Megatron's arguments to the train, valid and test streams.

    --megaresume-data data.yaml         the three parts of every source: by its own split, else by --split
    --data-path, --data-args-path       the same, blended as given; packed as GPTDataset does (``split``)
    --train-data-path, --valid-..., --per-split-data-args-path     a blend of whole corpora for each part

Two different values for one setting are an error, never resolved silently; so is anything a stream cannot provide.

`StreamOrder` is the training stream in the form that a checkpoint saves. Its clock is Megatron's
``args.consumed_train_samples``: a state is taken for exactly that many samples, however many were read ahead, and a
resume begins after exactly that many, whatever the checkpoint was saved with.
"""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaresume.batches.open import check_held_out, open_part, open_stream, open_validation
from megaresume.checkpoint.host import StreamData, change_lines
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.records.envelope import DataState
from megaresume.data.data_config import DataConfig
from megaresume.data.data_path import sources_from_data_path
from megaresume.data.split import PARTS, Part, split_ranges
from megaresume.hosts.megatron.load_rules import check_stages, without_state
from megaresume.stream.batches import Balance, BatchSchedule
from megaresume.stream.config import OnChange
from megaresume.stream.errors import ConfigError, MegaresumeError, StateError, UsageError
from megaresume.stream.skips import NO_SKIP, SkipConfig
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream

#: Megatron's default if ``--split`` is not given.
DEFAULT_SPLIT = "969, 30, 1"

_YAML = "--megaresume-data"
#: Flags that name the data, by their name on args.
_CLASSIC = {
    "data_path": "--data-path",
    "data_args_path": "--data-args-path",
    "train_data_path": "--train-data-path",
    "valid_data_path": "--valid-data-path",
    "test_data_path": "--test-data-path",
    "per_split_data_args_path": "--per-split-data-args-path",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PartData:
    """The data config or paths that one stream is opened from."""

    #: The mapping of a data.yaml.
    mapping: Mapping[str, Any]
    #: Directory that its relative paths start from.
    base_dir: Path
    #: For sources without their own split; None: take them whole.
    split: str | None
    #: Which part of the split.
    part: Part


@dataclass(frozen=True, kw_only=True, slots=True)
class Streams:
    """The three streams of a run."""

    train: Stream
    #: None: no such data, or nothing to evaluate.
    valid: Stream | None
    test: Stream | None


def open_streams(
    args: Any, data_file: str | None, on_change: OnChange = "refuse", state: StreamState | None = None
) -> Streams:
    """Open the streams that the arguments name. Not collective.

    Args:
        args: Megatron's arguments.
        data_file: ``--megaresume-data``, if given.
        on_change: what to do if the training config is not the checkpoint's.
        state: state of the run that continues, whose validation and test sets are kept as they were at its start.

    Raises:
        UsageError: flags that contradict each other, or that ask for what a stream cannot provide.
        ConfigError: training on held-out data.
        ConfigError, CorpusError, SetupError: see `megaresume.open_stream`.
    """
    named = None if data_file is None else DataConfig.of(data_file)
    parts = read_data(args, data_file, named)
    training = parts["train"]
    assert training is not None  # else read_data refuses
    train = _open(training, args, on_change)
    check_stages(train.config, args.seq_length)
    if named is not None and named.validation is not None and bool(getattr(args, "eval_iters", None)):
        return Streams(train=train, valid=_open_declared(args, str(data_file), named, train, state), test=None)
    held_out = {part: _open_held_out(parts, part, args, train, state) for part in PARTS[1:]}
    return Streams(train=train, valid=held_out["valid"], test=held_out["test"])


def _open_declared(args: Any, data_file: str, named: DataConfig, train: Stream, state: StreamState | None) -> Stream:
    """The one validation set that a data config declares."""
    declared = named.validation or {}
    if len(declared) > 1:
        raise UsageError(
            "Megatron evaluates one validation set",
            found=f"{len(declared)} in {data_file}: {', '.join(declared)}",
            expected="one",
            action="keep one of them in the data.yaml of this run; or blend their sources into one set",
        )
    sets = open_validation(named, train, seq_length=args.seq_length, seed=args.seed, state=state)
    return next(iter(sets.values()))


def _open_held_out(
    parts: Mapping[Part, PartData | None], name: Part, args: Any, train: Stream, state: StreamState | None
) -> Stream | None:
    data, training = parts[name], parts["train"]
    if data is None or training is None:
        return None
    if data.part != name:
        return _open(data, args, "refuse")  # separate corpora, named for this part
    of_training, sources = training.mapping["sources"], data.mapping["sources"]
    # Corpora without weights are weighted by their documents, which no flag changes.
    moved = any(_weight(sources[n]) != _weight(of_training[n]) for n in sources)
    stream = open_part(
        data.mapping,
        part=name,
        state=None if moved else state,
        seq_length=args.seq_length,
        seed=args.seed,
        split=data.split,
        base_dir=data.base_dir,
        left_out=[n for n in of_training if n not in sources],
    )
    check_held_out(train, stream, name, state)
    return stream


def _weight(entry: Any) -> Any:
    return entry.get("weight", 1) if isinstance(entry, Mapping) else 1


def read_data(args: Any, data_file: str | None, named: DataConfig | None = None) -> dict[Part, PartData | None]:
    """The `PartData` of each part; None for a part that does not exist or is not evaluated.

    ``named`` is the content of ``data_file``, if already read.

    Raises:
        UsageError, ConfigError: as `open_streams`. Opens no corpus, except to weight paths that have no weights.
    """
    _refuse(args, data_file)
    if data_file is not None:
        parts = _from_yaml(args, data_file, named or DataConfig.of(data_file))
    elif getattr(args, "data_path", None) or getattr(args, "data_args_path", None):
        parts = _from_blend(args)
    else:
        parts = _from_parts(args)
    if parts["train"] is None:
        raise UsageError(
            "there is no training data",
            found=_given(args) or "no flag that names any",
            expected=f"{_YAML} data.yaml, or --data-path and the like with a share for training",
            action=f"pass {_YAML} data.yaml or --data-path",
        )
    evaluates = bool(getattr(args, "eval_iters", 0))
    if not evaluates:
        return {"train": parts["train"], "valid": None, "test": None}
    if parts["valid"] is None and hasattr(args, "multiple_validation_sets"):
        # These versions evaluate all the same, and fail at the first evaluation with a TypeError.
        raise UsageError(
            "there is no validation data",
            found=f"--eval-iters {args.eval_iters}, and no validation data",
            expected="validation data, or no evaluation",
            action="pass --eval-iters 0, or give validation a share in --split (or --valid-data-path)",
        )
    return parts


def _open(data: PartData, args: Any, on_change: OnChange) -> Stream:
    return open_stream(
        data.mapping,
        seq_length=args.seq_length,
        seed=args.seed,
        split=data.split,
        part=data.part,
        base_dir=data.base_dir,
        on_change=on_change,
    )


def _given(args: Any, flags: Mapping[str, str] = _CLASSIC) -> str:
    return ", ".join(flag for name, flag in flags.items() if getattr(args, name, None))


def _refuse(args: Any, data_file: str | None) -> None:
    if getattr(args, "sft", False) and data_file is None:
        raise UsageError(
            "--sft with --data-path reads conversations from JSON lines, which a stream cannot",
            found=f"--sft, {_given(args)}",
            expected=f"tokenized conversations (.bin, .idx) in a data.yaml with packing best_fit, for {_YAML}",
            action=f"megaresume prepare, then {_YAML} data.yaml; or --megaresume-mode guard",
        )
    if data_file is not None and _given(args):
        raise UsageError(
            "the data is named twice",
            found=f"{_YAML} {data_file}, and {_given(args)}",
            expected="one of the two",
            action=f"remove {_given(args)}, or {_YAML}",
        )
    per_part = {name: flag for name, flag in _CLASSIC.items() if name.endswith("_data_path")}
    ways = [{name: flag} for name, flag in _CLASSIC.items() if name not in per_part] + [per_part]
    if sum(bool(_given(args, way)) for way in ways) > 1:
        raise UsageError(
            "the data is named in more than one way",
            found=_given(args),
            expected="--data-path, or --data-args-path, or one of --train-data-path (and --valid-data-path, "
            "--test-data-path) and --per-split-data-args-path",
            action="keep one of them",
        )
    split = {name: flag for name, flag in _CLASSIC.items() if name not in ("data_path", "data_args_path")}
    if _given(args, split) and getattr(args, "split", None) and not _split_is_a_default(args):
        raise UsageError(
            "--split has no meaning if every part has its own data",
            found=f"--split {args.split}, {_given(args, split)}",
            expected="one of the two",
            action="remove --split",
        )


def _split_is_a_default(args: Any) -> bool:
    """Whether ``--split`` may be a default: Megatron-DeepSpeed's parser sets Megatron's default split."""
    return str(args.split).replace(" ", "") == DEFAULT_SPLIT.replace(" ", "")


def _from_yaml(args: Any, data_file: str, named: DataConfig) -> dict[Part, PartData | None]:
    mapping, directory = named.mapping_for("train"), named.directory
    seed = mapping.get("seed")
    if seed is not None and seed != args.seed:
        raise UsageError(
            "two seeds",
            found=f"seed {seed} in {data_file}, --seed {args.seed}",
            expected="the same number, or none in the data config",
            cause="--seed is 1234 if it is not given",
            action=f"pass --seed {seed}, or remove seed from {data_file}",
        )
    split = str(getattr(args, "split", None) or DEFAULT_SPLIT)
    parts: dict[Part, PartData | None] = {}
    for part in PARTS:
        of_part = mapping if part == "train" else _evaluated(mapping, split, part)
        parts[part] = None if of_part is None else PartData(mapping=of_part, base_dir=directory, split=split, part=part)
    return parts


def _evaluated(mapping: Mapping[str, Any], split: str, part: Part) -> Mapping[str, Any] | None:
    """The data config for valid or test: only sources that have such a part, without their end conditions."""
    sources = mapping.get("sources")
    if not isinstance(sources, Mapping):
        return mapping  # refused later, by the config, with the reason
    kept: dict[str, Any] = {}
    for name, entry in sources.items():
        entry = {"path": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, Mapping):
            return mapping
        own = entry.get("split")
        if _share_is_zero(split if own is None else str(own), part):
            continue
        kept[name] = {key: value for key, value in entry.items() if key not in ("max_epochs", "on_exhausted")}
    weighted = [entry for entry in kept.values() if entry.get("weight", 1) not in (0, "0", 0.0)]
    # Validation stays fixed: training stages do not change it.
    return {**mapping, "sources": kept, "stages": None} if weighted else None


def _share_is_zero(split: str, part: Part) -> bool:
    return split_ranges(split, 1)[part] is None


def _from_blend(args: Any) -> dict[Part, PartData | None]:
    words = _words(args.data_path) if getattr(args, "data_path", None) else _file(args.data_args_path).split()
    split = str(getattr(args, "split", None) or DEFAULT_SPLIT)
    return {part: None if _share_is_zero(split, part) else _classic(words, split, part) for part in PARTS}


def _from_parts(args: Any) -> dict[Part, PartData | None]:
    path = getattr(args, "per_split_data_args_path", None)
    if path:
        try:
            given = json.loads(_file(path))
            blends = {part: given.get(part) for part in PARTS}
        except (ValueError, AttributeError) as error:
            raise ConfigError(
                f"{path} cannot be read",
                found=str(error),
                expected='{"train": [...], "valid": [...], "test": [...]}, each as after --data-path',
                action=f"correct {path}",
            ) from error
    else:
        blends = {part: getattr(args, f"{part}_data_path", None) for part in PARTS}
    # Whole corpora: each part is the "train" part of data without a split.
    return {part: _classic(_words(words), None, "train") if words else None for part, words in blends.items()}


def _classic(words: Sequence[str], split: str | None, part: Part) -> PartData:
    sources = sources_from_data_path(words, split=split, part=part)
    return PartData(mapping={"packing": "split", "sources": sources}, base_dir=Path(), split=split, part=part)


def _words(value: str | Sequence[str]) -> list[str]:
    return value.split() if isinstance(value, str) else [word for item in value for word in str(item).split()]


def _file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.unreadable(path, error, "a text file", action="check the path") from error


#: Seconds between two looks at the counter.
FOLLOW_EVERY = 0.5

log = logging.getLogger(__name__)


class StreamOrder(StreamData):
    """The order of the training samples. No method is collective: every rank plans the whole stream.

    Args:
        streams: opened, with the training stream at its start.
        saved: the stream's state in the loaded checkpoint; None if nothing was loaded.
        position: samples trained: ``args.consumed_train_samples``.
        iteration: steps done: ``args.iteration``.
        schedule: planned global batch sizes.
        skip: what flags leave out.
        end: computes how many samples the run will train with a given schedule, if that is known.
        balance: how the samples of a step are dealt to the ranks; None: in stream order.

    Raises:
        StateError: training continues, but there is no state to resume from; or the state has another config or other
            corpora (names the fields that differ); or ranks are balanced, and the position is inside a step.
    """

    def __init__(
        self,
        streams: Streams,
        *,
        saved: StreamState | None,
        position: int,
        iteration: int,
        schedule: BatchSchedule,
        skip: SkipConfig = NO_SKIP,
        end: Callable[[BatchSchedule], int] | None = None,
        balance: Balance | None = None,
    ) -> None:
        self.streams, self.stream = streams, streams.train
        self.position = position
        self.balance = balance
        self._followed: Any = None
        #: The same number on every rank, greater at every start of the run.
        self.launch = 0
        #: Number of virtual-pipeline chunks that have their data.
        self.chunks = 0
        #: The restored state, if any.
        self.state = saved
        self._restore(iteration)
        history = () if self.state is None else self.state.batches
        self.schedule = self.stream.schedule = schedule.resumed(history, position)
        if balance is not None:
            self.schedule.steps_before(position)  # ranks are dealt whole steps
        if skip or self.stream.config.skip:
            self.stream.skip(skip, end=None if end is None else end(self.schedule))

    def _restore(self, iteration: int) -> None:
        stream, state = self.stream, self.state
        if state is None:
            if iteration or self.position:
                raise without_state(iteration, self.position)
            return
        if self.position >= state.samples:
            stream.restore(state)
        else:  # --override-ckpt-iteration: planned from the start, and checked on the way
            stream.check(state)
        digest = stream.digest_at(state.samples)
        if digest != state.digest:
            raise StateError(
                "the restored stream is not at the sample where it was saved",
                found=f"digest {digest} at sample {state.samples}",
                expected=f"digest {state.digest}",
                cause="the state was edited, or a corpus has other lengths than its fingerprint says",
                action="megaresume verify DIR; or load an older checkpoint",
            )

    def snapshot(self, samples: int) -> StreamState:
        """The state for ``samples`` trained samples. Cheap near the front of the stream, where `follow` stays.

        Raises:
            StateError: ranks are balanced, and this is not at a step's end: other samples were trained.
        """
        if self.balance is not None:
            self.schedule.steps_before(samples)
        return self.stream.state_at(samples, batches=self.schedule.until(samples))

    def restore(self, state: DataState, choice: Choice) -> None:
        """See `Data`. The stream was opened at this state.

        Raises:
            StateError: it was opened at another.
        """
        if state != self.state:
            raise StateError(
                "the stream was opened with a different state from the one that was loaded",
                found=f"sample {self.position}",
                expected=f"sample {state.samples}, digest {state.digest}",
                cause="a second checkpoint was loaded after the data was built",
                action="load one checkpoint, once, in a new process",
            )

    def describe(self) -> list[str]:
        """See `Data`."""
        return change_lines(self.stream, self.schedule.size_at(self.position))

    def follow(self, args: Any) -> None:
        """Plan along with the training in a background thread, so that a save has little left to plan.

        With worker processes, and on ranks that read no data, nothing else plans in this process: a save after
        thousands of steps would have to catch up on all of them at once. The thread ends with this object, which an
        in-process restart replaces, or where the stream ends.
        """
        self._followed = args
        threading.Thread(target=_follow, args=(weakref.ref(self),), name="megaresume-follow", daemon=True).start()


def _follow(reference: weakref.ref[StreamOrder]) -> None:
    pause = threading.Event()
    while True:
        order = reference()
        if order is None:
            return
        position, stream = int(order._followed.consumed_train_samples), order.stream
        del order
        try:
            if position > stream.start:
                stream.plan(position - 1, position)
        except MegaresumeError as error:
            log.debug("megaresume: planning ahead ends: %s", error)  # whoever needs these samples will raise it
            return
        del stream
        pause.wait(FOLLOW_EVERY)
