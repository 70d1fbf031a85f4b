"""What ``metrics=`` of `megaresume.attach`, and ``--megaresume-metrics``, accept: the sinks, and the interval.

jsonl tensorboard=runs/tb otlp=http://localhost:4318 prometheus=9464 every=30
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megaresume.checkpoint.metrics.figures import Reading
from megaresume.checkpoint.metrics.sinks import SINKS
from megaresume.stream.errors import UsageError, near

#: seconds between two readings.
EVERY = 10.0
#: words that are not sinks -> their meaning.
OPTIONS = {
    "trainer": "the loggers that the trainer has already",
    "losses": "losses by source and by document without a call of yours, under Hugging Face's Trainer, DeepSpeed and "
    "Megatron-LM. losses=N: of every Nth micro-batch",
    "every": "every=SECONDS between two readings; 10 if it is left out",
}
#: all words -> their meaning.
WORDS = {word: kind.help for word, kind in SINKS.items()} | OPTIONS
#: help of the setting.
HELP = (
    f"live figures of the run, and their sinks: {', '.join([*SINKS, 'trainer'])}, each optionally with =WHERE; "
    "losses by source and document (losses=N: of every Nth micro-batch); every=SECONDS between two readings"
)

#: a user's function that is called with every reading.
Callback = Callable[[Reading], Any]


@dataclass(frozen=True, slots=True)
class MeterOptions:
    """The value of ``metrics=``, parsed."""

    #: (word of `SINKS`, where); "" without a value.
    sinks: tuple[tuple[str, str], ...] = ()
    #: the user's functions.
    functions: tuple[Callback, ...] = ()
    #: whether the trainer's own loggers are also a sink.
    trainer: bool = False
    #: collect the trainer's losses from every ``losses``-th micro-batch; 0: never.
    losses: int = 0
    #: seconds between two readings.
    every: float = EVERY


def parse(metrics: Any) -> MeterOptions:
    """Parse the words.

    Args:
        metrics: words, in one string or a list, which may include functions of a `Reading`. True: ``jsonl``.

    Raises:
        UsageError: an unknown word, or an invalid value.
    """
    if metrics is True:
        metrics = "jsonl"
    given: Iterable[Any] = metrics.split() if isinstance(metrics, str) else [metrics] if callable(metrics) else metrics
    sinks: list[tuple[str, str]] = []
    functions: list[Callback] = []
    trainer, losses, every = False, 0, EVERY
    for one in given:
        if callable(one):
            functions.append(one)
            continue
        word, _, where = str(one).partition("=")
        if word in SINKS:
            sinks.append((word, where))
        elif word == "every":
            every = _seconds(where)
        elif word == "losses":
            losses = _number(where)
        elif word == "trainer":
            if where:
                raise UsageError(
                    "metrics: trainer takes no value", found=str(one), expected="trainer", action="write trainer alone"
                )
            trainer = True
        else:
            raise UsageError(
                "unknown metrics sink",
                found=f"metrics: {one!r:.80}",
                expected=", ".join(WORDS),
                cause=near(word, WORDS),
                action="docs/metrics.md says what each word means",
            )
    return MeterOptions(tuple(dict.fromkeys(sinks)), tuple(functions), trainer, losses, every)


def _number(text: str) -> int:
    if text and not (text.isdecimal() and int(text)):
        raise UsageError(
            "metrics: losses takes a number of micro-batches",
            found=f"losses={text}",
            expected="losses=10",
            action="losses=N for every Nth micro-batch, or losses for each",
        )
    return int(text or "1")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.01 <= seconds < 1e9:
        raise UsageError(
            "metrics: every needs a number of seconds",
            found=f"every={text}",
            expected="0.01 or more",
            action="every=30, for example",
        )
    return seconds
