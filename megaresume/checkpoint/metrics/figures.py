"""The figures of a run: their names, units and meanings, in one table; and `Reading`: all of them at one sample.

Names and units follow OpenTelemetry's conventions (opentelemetry.io/docs/specs/semconv/general/metrics): lower case,
dots between parts, no unit in a name; UCUM units, with counted things in braces. docs/metrics.md is made from
`FIGURES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

#: attributes: whether a figure is given by source or by cause.
Attribute = Literal["", "source", "cause"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of the table."""

    name: str
    #: in UCUM.
    unit: str
    #: counter: only grows; the next process continues it or begins at 0. gauge: anything else. Steps, samples, counts
    #: by source and badput are gauges: a start after a kill resets them to its checkpoint, and Prometheus takes a
    #: falling counter for one that restarted at 0: ``rate()`` would add all of it again.
    kind: Literal["counter", "gauge"]
    #: one sentence.
    help: str
    attribute: Attribute = ""


def _source(name: str, unit: str, kind: Literal["counter", "gauge"], help: str) -> Figure:
    return Figure(f"megaresume.source.{name}", unit, kind, help, "source")


FIGURES = (
    Figure("megaresume.step", "{step}", "gauge", "optimizer steps made since the start of the run"),
    Figure("megaresume.step.duration", "s", "gauge", "seconds of a step, saves included, since the last reading"),
    Figure("megaresume.samples", "{sample}", "gauge", "samples trained since the start of the run, by all ranks"),
    Figure("megaresume.tokens", "{token}", "gauge", "tokens of documents in them, padding left out"),
    Figure("megaresume.fill", "1", "gauge", "fraction of non-padding tokens in the samples since the last reading"),
    _source("tokens", "{token}", "gauge", "tokens of the source in the samples trained"),
    _source("trained", "{token}", "gauge", "of them, those whose loss counts"),
    _source("documents", "{document}", "gauge", "documents that began in the samples trained, once for each epoch"),
    _source("cut", "{document}", "gauge", "of them, those that lie in more than one segment"),
    _source("share", "1", "gauge", "part of the source in what was drawn since the stage began, in the unit of blend"),
    _source("weight", "1", "gauge", "part that its weight asks for"),
    _source("epoch", "{epoch}", "gauge", "epochs of the source that were drawn, with a fraction"),
    _source("left", "{document}", "gauge", "documents, or parts of long ones, until its epoch ends"),
    _source("loss", "1", "gauge", "its loss by token, a moving average over about 100 steps (natural logarithm)"),
    Figure("megaresume.data.wait", "s", "counter", "seconds that this process has waited for micro-batches"),
    Figure("megaresume.data.wait.longest", "s", "gauge", "the longest wait for a micro-batch since the last reading"),
    Figure("megaresume.data.wait.slowest_rank", "s", "counter", "data.wait of the process that waited most"),
    Figure("megaresume.data.ahead", "{batch}", "gauge", "micro-batches that threads of this process have read ahead"),
    Figure(
        "megaresume.store.retries",
        "{retry}",
        "counter",
        "requests to a store that were tried again, by all processes of the run and their workers",
    ),
    Figure("megaresume.store.retries.worst_rank", "{retry}", "counter", "store.retries of the process that has most"),
    Figure(
        "megaresume.cache.hits",
        "{record}",
        "counter",
        "records of a store that were found in cache_dir, by all processes of the run and their workers",
    ),
    Figure("megaresume.cache.misses", "{record}", "counter", "records that were not, and were read from the store"),
    Figure("megaresume.checkpoint.step", "{step}", "gauge", "step of the newest complete checkpoint"),
    Figure("megaresume.checkpoint.durable", "{step}", "gauge", "step of the newest checkpoint that is on the disk"),
    Figure("megaresume.checkpoint.age", "s", "gauge", "seconds since the save of the newest durable one began"),
    Figure("megaresume.checkpoint.size", "By", "gauge", "size of the newest checkpoint"),
    Figure("megaresume.checkpoint.duration", "s", "gauge", "seconds from the beginning of its save to its commit"),
    Figure("megaresume.checkpoint.wait", "s", "counter", "seconds that the training stood still for saves"),
    Figure("megaresume.run.starts", "{start}", "counter", "starts of the run, this one included"),
    Figure("megaresume.run.repeated", "{sample}", "counter", "samples trained again because a kill lost them"),
    Figure("megaresume.disk.free", "By", "gauge", "free space where the run saves"),
    Figure("megaresume.goodput", "1", "gauge", "part of the run's time that made steps which were kept"),
    Figure("megaresume.badput", "s", "gauge", "seconds of the run that made none, by cause", "cause"),
)

BY_NAME = {figure.name: figure for figure in FIGURES}

#: a number, or one per source or cause.
Value = float | Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The figures at one sample; unknown ones are left out."""

    #: seconds since 1970.
    time: float
    step: int
    samples: int
    #: name -> value: see `FIGURES`.
    figures: Mapping[str, Value] = field(default_factory=dict)

    def each(self) -> Iterator[tuple[Figure, str, float]]:
        """Every number, with its source or cause; "" without one."""
        for name, value in self.figures.items():
            numbers = value if isinstance(value, Mapping) else {"": value}
            for label, number in numbers.items():
                yield BY_NAME[name], label, number

    def flat(self) -> dict[str, float]:
        """Every number by a flat name, as loggers expect it: ``megaresume/source/tokens/web``."""
        return {
            figure.name.replace(".", "/") + (f"/{label}" if label else ""): number
            for figure, label, number in self.each()
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"time": self.time, "step": self.step, "samples": self.samples, "figures": dict(self.figures)}
