"""Megatron's arguments: our flags in its parser, and the global batch size of every step.

Megatron's ``_add_data_args`` registers the data flags; ours follow them. A run from ``--yaml-cfg`` has no parser
defaults and drops the command line, so `Settings.from_args` takes nothing for granted.

`schedule_from_args` gives the sizes as Megatron will use them. There are three kinds of schedule
(megatron.core.num_microbatches_calculator): constant; ``--rampup-batch-size`` up to 0.17, which 0.18 still parses but
ignores; and ``--step-batch-size-schedule`` since 0.18, whose thresholds are tokens, counted in whole samples. The size
changes only between steps, so the step that crosses a threshold still has the old size.
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, get_args

from megaresume.checkpoint.flags import PREFIX, add_settings, flag_of
from megaresume.checkpoint.settings import GROUPS, Checkpoints, LoaderOptions, Mode
from megaresume.checkpoint.stopping import SIGNALS, StopConditions, minutes_before_end
from megaresume.stream.arguments import check_types
from megaresume.stream.batches import Balance, BatchSchedule, ramp_sizes
from megaresume.stream.config import OnChange
from megaresume.stream.errors import UsageError
from megaresume.stream.skips import SkipConfig, parse_range, parse_steps, union

G = TypeVar("G", Checkpoints, LoaderOptions)

_MODES = get_args(Mode)
_ON_CHANGE = get_args(OnChange)
_FIRST_FLAG = f"{PREFIX}data"

#: Our flags, without ``--megaresume-``.
_WORDS = tuple(
    flag_of(field).removeprefix(PREFIX).replace("-", "_")
    for group in GROUPS.values()
    for field in fields(group)
    if "megatron" in field.metadata["hosts"]
)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags, unless the parser has them already. Both dashes and underscores are accepted."""
    if _FIRST_FLAG in parser._option_string_actions:
        return parser
    ours = parser.add_argument_group("megaresume", "exact resume of the data")
    for group in GROUPS.values():
        add_settings(ours, group, "megatron")
    if "--skip-train-iteration-range" not in parser._option_string_actions:
        ours.add_argument(
            "--skip-train-iteration-range",
            "--skip_train_iteration_range",
            nargs="+",
            metavar="FIRST-LAST",
            default=None,
            help="mode stream: iterations, counted from 1, the last one included, whose samples are not trained",
        )
    return parser


def around_add_data_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook on Megatron's ``_add_data_args(parser) -> parser`` that adds our flags after its own."""

    def add_data_args(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        return add_arguments(original(parser, *args, **kwargs) or parser)

    return add_data_args


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The values of our flags."""

    mode: Mode
    #: Path of a data.yaml; None: the classic flags name the data.
    data: str | None = None
    #: Names of differences that the guard accepts.
    accept: tuple[str, ...] = ()
    #: What to do about a changed data config.
    on_change: OnChange = "refuse"
    #: Directory for the sample logs; None: no logs.
    log_samples: str | None = None
    #: Ranges of samples to leave untrained.
    skip_samples: tuple[str, ...] = ()
    #: Which old checkpoints to keep, how often to retry a failed save, and the like.
    checkpoints: Checkpoints = Checkpoints()
    #: When to save and exit, besides what Megatron's own flags say; None: never.
    stop: StopConditions | None = None
    #: Sinks of live figures; None: no figures.
    metrics: Any = None
    #: Whether to convert a ZeRO checkpoint from another number of ranks.
    elastic: bool = False
    #: How the samples of a step are dealt to the ranks; None: in stream order.
    balance: Balance | None = None

    @classmethod
    def from_args(cls, args: Any, argv: Sequence[str] | None = None) -> Settings:
        """Read the settings from Megatron's namespace, or from the command line if it lacks them (YAML runs).

        Args:
            args: Megatron's namespace.
            argv: command line without the program name; None: that of this process.

        Raises:
            UsageError: an unknown mode, flags that contradict each other, or Megatron's in-process restart.
        """
        source = args
        if all(getattr(args, f"megaresume_{word}", None) is None for word in _WORDS):
            source = _from_command_line(sys.argv[1:] if argv is None else argv)
        said = {word: getattr(source, f"megaresume_{word}", None) for word in _WORDS}
        mode: Mode = said["mode"] or ("guard" if said["data"] is None else "stream")
        _refuse(said, mode)
        if mode != "off" and getattr(args, "inprocess_restart", False):
            raise UsageError(
                "--inprocess-restart cannot be used with megaresume",
                found="--inprocess-restart",
                expected="processes that are started again after a fault",
                cause="it calls pretrain() again in the same process, which was not tried under Megatron",
                action="leave it out; torchrun --max-restarts restarts the ranks in place (docs/stopping.md)",
            )
        checkpoints = _group(Checkpoints, said)
        if checkpoints.keep_last is not None and checkpoints.keep_every is None:
            # Megatron's own retention becomes one of our rules as soon as we have another.
            checkpoints = replace(checkpoints, keep_every=getattr(args, "save_retain_interval", None))
        _ = checkpoints.retention, checkpoints.retries  # refuse bad values now, not at the first save
        return cls(
            mode=mode,
            data=None if said["data"] is None else str(said["data"]),
            accept=_words(said["accept"]),
            on_change=said["on_change"] or "refuse",
            skip_samples=_words(said["skip_samples"]),
            log_samples=None if said["log_samples"] is None else str(said["log_samples"]),
            checkpoints=checkpoints,
            stop=_stop(args, said["stop_file"], said["stop_before_end"]),
            metrics=said["metrics"],
            elastic=bool(said["elastic"]),
            balance=_group(LoaderOptions, said).balanced,
        )


def _refuse(said: Mapping[str, Any], mode: str) -> None:
    """Raise a UsageError for words that no parser has checked, and for contradicting flags."""
    for word, known, what in (("mode", _MODES, "mode"), ("on_change", _ON_CHANGE, "answer to a change")):
        if said[word] is not None and said[word] not in known:
            raise UsageError(
                f"unknown {what}",
                found=f"{PREFIX}{word.replace('_', '-')} {said[word]}",
                expected=f"one of {', '.join(known)}",
                cause="a typing error in the YAML config, whose values no parser checks",
                action="correct it in the YAML config",
            )
    if said["data"] is not None and mode == "guard":
        raise UsageError(
            "two flags contradict each other",
            found=f"--megaresume-mode guard and --megaresume-data {said['data']}",
            expected="guard for Megatron's own datasets, or a data.yaml for our stream",
            action="leave out one of the two flags",
        )
    unknown_items = "Megatron's own datasets do not say which sample of a stream an item is"
    unread = "the samples of Megatron's own datasets are not known before they are read"
    for word, what, cause in (
        ("log_samples", "samples are logged", unknown_items),
        ("balance", "ranks are balanced", unread),
    ):
        flag = f"{PREFIX}{word.replace('_', '-')}"
        if said[word] is not None and mode != "stream":
            raise UsageError(
                f"{what} in stream mode only",
                found=f"{flag} {said[word]} in mode {mode}",
                expected="--megaresume-data, or --megaresume-mode stream",
                cause=cause,
                action=f"remove {flag}",
            )


def _group(group: type[G], said: Mapping[str, Any]) -> G:
    """A group of settings, from the flags that were given."""
    given = {field.name: value for field in fields(group) if (value := said.get(field.name)) is not None}
    check_types(group, given, flag_of=flag_of)  # the values of a YAML config were not checked by any parser
    return group(**given)


def _stop(args: Any, file: str | None, before_end: Any) -> StopConditions | None:
    """The stop conditions in our flags, plus the signals that Megatron's ``--exit-signal-handler`` does not handle."""
    handled = getattr(getattr(args, "exit_signal", None), "name", "SIGTERM")
    listens = bool(getattr(args, "exit_signal_handler", False))
    signals = tuple(name for name in SIGNALS if name != handled) if listens else ()
    if not signals and file is None and before_end is None:
        return None
    return StopConditions(signals=signals, file=file, before_end=minutes_before_end(before_end))


def _words(value: object) -> tuple[str, ...]:
    """A list of words, which a YAML config may give as one string."""
    found: Iterable[Any] = value.split() if isinstance(value, str) else value or ()  # type: ignore[assignment]
    return tuple(str(word) for word in found)


def skip_of(args: Any, settings: Settings, *, from_0: bool) -> SkipConfig:
    """The samples that our flags and Megatron's leave out of the stream.

    Args:
        args: Megatron's namespace.
        settings: our flags.
        from_0: whether this Megatron counts ``--iterations-to-skip`` from 0 (before core 0.17).

    Raises:
        ConfigError: a range that is malformed or backward.
    """
    ranges = [parse_range(word, "--megaresume-skip-samples") for word in settings.skip_samples]
    given = getattr(args, "skip_train_iteration_range", None) or ()
    given = given.split() if isinstance(given, str) else given
    steps = [parse_steps(entry, "--skip-train-iteration-range") for entry in given]
    single = getattr(args, "iterations_to_skip", None) or ()
    steps += [parse_steps(int(entry) + from_0, "--iterations-to-skip") for entry in single]
    return SkipConfig(samples=union(ranges), steps=tuple(dict.fromkeys(steps)))


def _from_command_line(argv: Sequence[str]) -> argparse.Namespace:
    """Parse our flags from a command line whose other flags are unknown to us."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    return add_arguments(parser).parse_known_args(list(argv))[0]


_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def schedule_from_args(args: Any, project: Any = None, start: int = 0) -> BatchSchedule:
    """The planned batch sizes of a run from the step that begins at ``start``; for earlier samples, that step's size.

    Args:
        args: Megatron's namespace.
        project: which Megatron; None: use what the arguments alone tell.
        start: samples trained. Where the size changes depends on it, as earlier steps may have had other sizes.

    Raises:
        UsageError: no size at all, or a schedule that Megatron would refuse too.
    """
    running = _running(args)
    if steps := getattr(args, "step_batch_size_schedule", None):
        planned, bounds = _step_sizes(steps, int(args.seq_length))
    else:
        final, rampup = _final_size(args), getattr(args, "rampup_batch_size", None)
        if not rampup or ignores_rampup(args, project):
            return BatchSchedule.constant(running(final))
        planned, bounds = _ramp_sizes([int(number) for number in rampup], final)
    return BatchSchedule.stepwise(lambda sample: running(planned(sample)), bounds, first=start)


def _final_size(args: Any) -> int:
    final = getattr(args, "global_batch_size", None)
    if not final:
        raise UsageError(
            "the global batch size is not known",
            found=f"--global-batch-size {final}",
            expected="samples of one optimizer step",
            action="pass --global-batch-size",
        )
    return int(final)


def ignores_rampup(args: Any, project: Any = None) -> bool:
    """Whether this Megatron parses ``--rampup-batch-size`` but trains with a constant size."""
    # 0.18 both introduced the replacement flag and stopped honoring this one.
    newer = hasattr(args, "step_batch_size_schedule")
    return newer or (project is not None and project.kind == "megatron-lm" and project.at_least(0, 18))


def data_parallel_size(args: Any) -> int:
    """Number of ranks that read different samples, as Megatron's samplers count them.

    Since core 0.19, ``args.data_parallel_size`` leaves out the ranks that share the weights of a layer
    (``--tensor-parallel-num-weight-shards``), although they read different samples.
    """
    names = ("data_parallel_size", "gtp_weight_remat_size")
    size, apart = (int(getattr(args, name, None) or 1) for name in names)
    return size * apart


def _running(args: Any) -> Callable[[int], int]:
    """The batch size in use: with ``--decrease-batch-size-if-needed``, rounded down to what divides over the ranks."""
    if not getattr(args, "decrease_batch_size_if_needed", False):
        return lambda size: size
    ranks = data_parallel_size(args)
    stride = int(args.micro_batch_size) * ranks

    def rounded(size: int) -> int:
        if size < stride:
            raise UsageError(
                "the global batch is smaller than one micro-batch on every rank",
                found=f"global batch size {size}, micro-batch size {args.micro_batch_size}, data-parallel size {ranks}",
                expected=f"at least {stride}",
                action="fewer ranks, or a smaller --micro-batch-size",
            )
        return size // stride * stride

    return rounded


_Sizes = tuple[Callable[[int], int], Sequence[float]]


def _ramp_sizes(rampup: Sequence[int], final: int) -> _Sizes:
    """The planned size at a sample, and the samples around which the size changes."""
    start, increment, samples = rampup if len(rampup) == 3 else (0, 0, 0)
    if start < 1 or increment < 1 or samples < 1 or final <= start or (final - start) % increment:
        raise UsageError(
            "bad --rampup-batch-size",
            found=f"{' '.join(map(str, rampup))}, with --global-batch-size {final}",
            expected="start, increment and ramp-up samples, where the final size is the start plus a whole number of "
            "increments, at least one",
            action="change the increment or --global-batch-size",
        )
    return ramp_sizes(start, increment, samples, final)


def _step_sizes(text: str, seq_length: int) -> _Sizes:
    try:
        words = [word.split(":", 1) for word in text.replace(",", " ").split()]
        pairs = sorted((_number(first) // seq_length, _number(size)) for first, size in words)
    except ValueError as error:
        raise _bad_steps(text) from error
    firsts, sizes = [first for first, _ in pairs], [size for _, size in pairs]
    if not pairs or firsts[0] != 0 or len(set(firsts)) != len(firsts) or min(sizes) < 1:
        raise _bad_steps(text)
    return (lambda sample: sizes[bisect_right(firsts, sample) - 1]), firsts[1:]


def _number(word: str) -> int:
    word = word.strip().upper()
    factor = _SUFFIXES.get(word[-1:], 1)
    return int(float(word[:-1] if factor > 1 else word) * factor)


def _bad_steps(text: str) -> UsageError:
    return UsageError(
        "bad --step-batch-size-schedule",
        found=repr(text),
        expected="TOKENS:SIZE pairs, the first at 0, each at another sample",
        action='for example --step-batch-size-schedule "0:768 250B:1536"',
    )
