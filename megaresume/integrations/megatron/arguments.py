"""Our flags in Megatron's parser, and what they say.

``_add_data_args`` of Megatron registers the flags of the data; ours follow right behind. A run from ``--yaml-cfg`` has
no parser defaults and drops the command line, so `Settings.from_args` takes nothing for granted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megaresume.checkpoint.progress import MAX_STARTS
from megaresume.checkpoint.retention import KEEP_ALL, Retention
from megaresume.integrations.stop_conditions import SIGNALS, StopConditions, minutes_before_end
from megaresume.stream.config import OnChange
from megaresume.stream.errors import UsageError
from megaresume.stream.ranges import union
from megaresume.stream.skips import SkipConfig, parse_range, parse_steps

__all__ = ["Mode", "Settings", "add_arguments", "around_add_data_args", "skip_of"]

#: stream: our samples. guard: Megatron's own datasets, recorded and pinned. off: the hooks do nothing.
Mode = Literal["stream", "guard", "off"]

_MODES: tuple[Mode, ...] = ("stream", "guard", "off")
_ON_CHANGE: tuple[OnChange, ...] = ("refuse", "stage")
_FIRST_FLAG = "--megaresume-data"

#: our flags, without ``--megaresume-``.
_WORDS = (
    *("data", "mode", "accept", "on_change", "log_samples", "skip_samples", "elastic", "keep_last", "keep_every"),
    *("stop_file", "stop_before_end", "max_starts", "verify_checkpoint"),
)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags, unless the parser has them already. Both dashes and underscores are accepted."""
    if _FIRST_FLAG in parser._option_string_actions:
        return parser
    group = parser.add_argument_group("megaresume", "exact resume of the data")
    group.add_argument(
        _FIRST_FLAG,
        "--megaresume_data",
        metavar="FILE",
        default=None,
        help="data.yaml with the sources, weights and packing: train on the stream that it describes, instead of on "
        "Megatron's own datasets",
    )
    group.add_argument(
        "--megaresume-mode",
        "--megaresume_mode",
        choices=_MODES,
        default=None,
        help="stream: train on our stream (of --megaresume-data, or of --data-path and its kin). guard: keep "
        "Megatron's own datasets, and make sure that a resume rebuilds their order. off: do nothing. "
        "Default: stream with --megaresume-data, otherwise guard",
    )
    group.add_argument(
        "--megaresume-on-change",
        "--megaresume_on_change",
        choices=_ON_CHANGE,
        default=None,
        help="where the data config is not the one of the checkpoint. refuse: stop, naming what differs (default). "
        "stage: begin a new stage there; every source goes on at its own position",
    )
    group.add_argument(
        "--megaresume-log-samples",
        "--megaresume_log_samples",
        metavar="DIR",
        default=None,
        help="every process that reads data writes into DIR what it was handed in every step, for megaresume verify "
        "(stream mode)",
    )
    group.add_argument(
        "--megaresume-skip-samples",
        "--megaresume_skip_samples",
        nargs="+",
        metavar="A:B",
        default=None,
        help="samples A to B-1 of the stream, counted from 0 with what is left out, that are not to be trained: the "
        "data behind them moves up. Kept in the checkpoint; the flag may stay in the launch script",
    )
    if "--skip-train-iteration-range" not in parser._option_string_actions:
        group.add_argument(
            "--skip-train-iteration-range",
            "--skip_train_iteration_range",
            nargs="+",
            metavar="FIRST-LAST",
            default=None,
            help="mode stream: iterations, counted from 1, the last one included, whose samples are not trained",
        )
    group.add_argument(
        "--megaresume-elastic",
        "--megaresume_elastic",
        action="store_true",
        help="Megatron-DeepSpeed: a ZeRO checkpoint that another number of data-parallel ranks saved is converted when "
        "it is loaded, and not refused",
    )
    group.add_argument(
        "--megaresume-keep-last",
        "--megaresume_keep_last",
        type=int,
        metavar="K",
        default=None,
        help="delete old checkpoints when a newer one is complete: keep the newest K (stream mode)",
    )
    group.add_argument(
        "--megaresume-keep-every",
        "--megaresume_keep_every",
        type=int,
        metavar="N",
        default=None,
        help="keep those besides whose iteration N divides; with --megaresume-keep-last, --save-retain-interval is "
        "the same",
    )
    group.add_argument(
        "--megaresume-stop-file",
        "--megaresume_stop_file",
        metavar="FILE",
        default=None,
        help="save and exit when this file appears; it is removed then",
    )
    group.add_argument(
        "--megaresume-stop-before-end",
        "--megaresume_stop_before_end",
        nargs="?",
        const="auto",
        metavar="MINUTES",
        default=None,
        help="save and exit so many minutes before the end of the Slurm job; without a number: as long before as a "
        "save was measured to take",
    )
    group.add_argument(
        "--megaresume-max-starts",
        "--megaresume_max_starts",
        type=int,
        metavar="N",
        default=None,
        help=f"refuse to start more often than this from one iteration without a save between (default: {MAX_STARTS}; "
        "0: any number)",
    )
    group.add_argument(
        "--megaresume-verify-checkpoint",
        "--megaresume_verify_checkpoint",
        action="store_true",
        default=None,
        help="checksums of all files at every save and load, not only their sizes (stream mode)",
    )
    group.add_argument(
        "--megaresume-accept",
        "--megaresume_accept",
        nargs="+",
        metavar="NAME",
        default=None,
        help="differences from the recorded order of Megatron's own datasets that are meant, by the names that the "
        "refusal gave them; kept in the record for ever",
    )
    return parser


def around_add_data_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's ``_add_data_args(parser) -> parser``, and our flags behind its own."""

    def add_data_args(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        return add_arguments(original(parser, *args, **kwargs) or parser)

    return add_data_args


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What our flags say."""

    mode: Mode
    #: path of a data.yaml; None: the classic flags say what the data is.
    data: str | None = None
    #: names of differences that the guard accepts.
    accept: tuple[str, ...] = ()
    #: what becomes of a changed data config.
    on_change: OnChange = "refuse"
    #: directory for the logs of samples; None: none are written.
    log_samples: str | None = None
    #: ranges of samples that are not to be trained.
    skip_samples: tuple[str, ...] = ()
    #: convert a ZeRO checkpoint of another number of ranks.
    elastic: bool = False
    #: which old checkpoints stay.
    retention: Retention = KEEP_ALL
    #: when to save and exit, besides what Megatron's own flags say; None: never.
    stop: StopConditions | None = None
    #: starts from one iteration without a save; 0: any number.
    max_starts: int = MAX_STARTS
    #: checksums at every save and load.
    verify_checkpoint: bool = False

    @classmethod
    def from_args(cls, args: Any, argv: Sequence[str] | None = None) -> Settings:
        """Read them from Megatron's namespace, or from the command line where that did not get there (YAML runs).

        Args:
            args: Megatron's namespace.
            argv: the command line, without the program; None: this process's.

        Raises:
            UsageError: an unknown mode, or flags that contradict each other.
        """
        source = args
        if not any(getattr(args, f"megaresume_{word}", None) for word in _WORDS):
            source = _from_command_line(sys.argv[1:] if argv is None else argv)
        said = {word: getattr(source, f"megaresume_{word}", None) for word in _WORDS}
        data, mode, accept, on_change = (said[word] for word in ("data", "mode", "accept", "on_change"))
        log_samples, skip_samples = said["log_samples"], said["skip_samples"]
        if mode is not None and mode not in _MODES:
            raise UsageError(
                "unknown mode",
                found=f"--megaresume-mode {mode}",
                expected=f"one of {', '.join(_MODES)}",
                cause="a typing error in the YAML config, whose values no parser checks",
            )
        if on_change is not None and on_change not in _ON_CHANGE:
            raise UsageError(
                "unknown answer to a change",
                found=f"--megaresume-on-change {on_change}",
                expected=f"one of {', '.join(_ON_CHANGE)}",
                cause="a typing error in the YAML config, whose values no parser checks",
            )
        if data is not None and mode == "guard":
            raise UsageError(
                "two flags contradict each other",
                found=f"--megaresume-mode guard and --megaresume-data {data}",
                expected="guard for Megatron's own datasets, or a data.yaml for our stream",
                action="leave out one of the two flags",
            )
        if log_samples is not None and (mode or ("guard" if data is None else "stream")) != "stream":
            raise UsageError(
                "samples are logged in stream mode only",
                found=f"--megaresume-log-samples {log_samples} in mode {mode or 'guard'}",
                expected="--megaresume-data, or --megaresume-mode stream",
                cause="Megatron's own datasets do not say which sample of a stream an item is",
                action="remove --megaresume-log-samples",
            )
        names_accepted = accept.split() if isinstance(accept, str) else accept or ()
        return cls(
            mode=mode or ("guard" if data is None else "stream"),
            data=None if data is None else str(data),
            accept=tuple(str(name) for name in names_accepted),
            on_change=on_change or "refuse",
            skip_samples=tuple(_list(skip_samples)),
            log_samples=None if log_samples is None else str(log_samples),
            elastic=bool(said["elastic"]),
            retention=_retention(args, said["keep_last"], said["keep_every"]),
            stop=_stop(args, said["stop_file"], said["stop_before_end"]),
            max_starts=MAX_STARTS if said["max_starts"] is None else int(said["max_starts"]),
            verify_checkpoint=bool(said["verify_checkpoint"]),
        )


def _retention(args: Any, keep_last: int | None, keep_every: int | None) -> Retention:
    """What our flags say; Megatron's own retention is one of them as soon as there is another."""
    if keep_last is not None and keep_every is None:
        keep_every = getattr(args, "save_retain_interval", None)
    return Retention(keep_last=keep_last, keep_every=keep_every)


def _stop(args: Any, file: str | None, before_end: Any) -> StopConditions | None:
    """What our flags say, and with Megatron's ``--exit-signal-handler`` the signals that it does not listen to."""
    handled = getattr(getattr(args, "exit_signal", None), "name", "SIGTERM")
    listens = bool(getattr(args, "exit_signal_handler", False))
    signals = tuple(name for name in SIGNALS if name != handled) if listens else ()
    if not signals and file is None and before_end is None:
        return None
    return StopConditions(signals=signals, file=file, before_end=minutes_before_end(before_end))


def _list(value: object) -> list[str]:
    words = value.split() if isinstance(value, str) else value or ()
    return [str(word) for word in words]  # type: ignore[attr-defined]


def skip_of(args: Any, settings: Settings, *, from_0: bool) -> SkipConfig:
    """What the flags want left out of the stream, ours and Megatron's.

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
    """Our flags on a command line whose other flags we do not know."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    return add_arguments(parser).parse_known_args(list(argv))[0]
