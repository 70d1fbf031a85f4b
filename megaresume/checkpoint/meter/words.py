"""What ``metrics=`` of `megaresume.attach`, and ``--megaresume-metrics``, say: who is told, and how often.

jsonl tensorboard=runs/tb otlp=http://localhost:4318 prometheus=9464 every=30
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megaresume.checkpoint.meter.figures import Reading
from megaresume.stream.errors import UsageError
from megaresume.stream.schema import near

#: seconds between two readings.
EVERY = 10.0
#: word -> what it means; a value after ``=`` says where.
WORDS = {
    "jsonl": "lines of JSON in the run's directory; they are always written if anything is asked for. jsonl=FILE: to "
    "a file of their own as well",
    "tensorboard": "event files, in the run's directory or tensorboard=DIR",
    "otlp": "to an OpenTelemetry collector, http://localhost:4318 or otlp=URL",
    "prometheus": "for a Prometheus to fetch, on port 9464 of the loopback address, or prometheus=[HOST:]PORT",
    "wandb": "Weights & Biases, offline, in the run's directory or wandb=DIR",
    "mlflow": "MLflow's files, in the run's directory or mlflow=DIR",
    "trainer": "the loggers that the trainer has already",
    "every": "every=SECONDS between two readings; 10 if it is left out",
}

#: what is told of every reading: a function, as a user may give one.
Told = Callable[[Reading], Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for."""

    #: (word, where); "" if that is not said.
    sinks: tuple[tuple[str, str], ...] = ()
    #: functions of the user's.
    functions: tuple[Told, ...] = ()
    #: seconds between two readings.
    every: float = EVERY

    @property
    def trainer(self) -> bool:
        """Whether the trainer's own loggers are told."""
        return ("trainer", "") in self.sinks


def parse(metrics: Any) -> Asked:
    """What the words say.

    Args:
        metrics: words, in one string or a list; functions of a `Reading` among them. True: ``jsonl``.

    Raises:
        UsageError: an unknown word, or a value that cannot be.
    """
    if metrics is True:
        metrics = "jsonl"
    given: Iterable[Any] = metrics.split() if isinstance(metrics, str) else [metrics] if callable(metrics) else metrics
    sinks: list[tuple[str, str]] = []
    functions: list[Told] = []
    every = EVERY
    for one in given:
        if callable(one):
            functions.append(one)
            continue
        word, _, where = str(one).partition("=")
        if word not in WORDS:
            raise UsageError(
                "nobody of this name can be told the figures",
                found=f"metrics: {one!r:.80}",
                expected=", ".join(WORDS),
                cause=near(word, WORDS),
                action="docs/metrics.md says what each word means",
            )
        if word == "every":
            every = _seconds(where)
        elif word == "trainer" and where:
            raise UsageError("metrics: trainer takes no value", found=str(one), expected="trainer")
        else:
            sinks.append((word, where))
    return Asked(tuple(dict.fromkeys(sinks)), tuple(functions), every)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.01 <= seconds < 1e9:
        raise UsageError(
            "metrics: every needs a number of seconds", found=f"every={text}", expected="0.01 or more: every=30"
        )
    return seconds
