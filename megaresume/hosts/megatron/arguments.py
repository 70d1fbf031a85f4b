"""Our flags in Megatron's parser, and what they say.

``_add_data_args`` of Megatron registers the flags of the data; ours follow them. A run from ``--yaml-cfg`` has
no parser defaults and drops the command line, so `Settings.from_args` takes nothing for granted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

from megaresume.checkpoint.saving.retention import KEEP_ALL, Retention
from megaresume.checkpoint.start import MAX_STARTS
from megaresume.session.flags import PREFIX, add_settings, flag_of
from megaresume.session.retries import Retries
from megaresume.session.settings import GROUPS, Checkpoints, Loader, Mode
from megaresume.session.stopping import SIGNALS, StopConditions, minutes_before_end
from megaresume.stream.config import OnChange
from megaresume.stream.dealing.balance import Balance
from megaresume.stream.errors import UsageError
from megaresume.stream.ranges import union
from megaresume.stream.skips import SkipConfig, parse_range, parse_steps

_MODES = get_args(Mode)
_ON_CHANGE = get_args(OnChange)
_FIRST_FLAG = f"{PREFIX}data"

#: our flags, without ``--megaresume-``.
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
    """Megatron's ``_add_data_args(parser) -> parser``, and our flags after its own."""

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
    checksums: bool = True
    #: how the samples of a step are dealt to the ranks; None: in the order of the stream.
    balance: Balance | None = None
    #: what follows if a save fails for a reason that may pass.
    retries: Retries = Checkpoints().retries

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
        if all(getattr(args, f"megaresume_{word}", None) is None for word in _WORDS):
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
        if said["balance"] is not None and (mode or ("guard" if data is None else "stream")) != "stream":
            raise UsageError(
                "ranks are balanced in stream mode only",
                found=f"--megaresume-balance {said['balance']} in mode {mode or 'guard'}",
                expected="--megaresume-data, or --megaresume-mode stream",
                cause="the samples of Megatron's own datasets are not known before they are read",
                action="remove --megaresume-balance",
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
            checksums=said["checksums"] is not False,
            balance=_balance(said),
            retries=_retries(said),
        )


def _retention(args: Any, keep_last: int | None, keep_every: int | None) -> Retention:
    """What our flags say; Megatron's own retention is one of them as soon as there is another."""
    if keep_last is not None and keep_every is None:
        keep_every = getattr(args, "save_retain_interval", None)
    return Retention(keep_last=keep_last, keep_every=keep_every)


def _balance(said: Mapping[str, Any]) -> Balance | None:
    names = ("balance", "balance_token_cost")
    return Loader(**{name: said[name] for name in names if said[name] is not None}).balanced


def _retries(said: Mapping[str, Any]) -> Retries:
    names = ("save_retries", "save_retry_wait", "on_save_failure")
    return Checkpoints(**{name: said[name] for name in names if said[name] is not None}).retries


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
