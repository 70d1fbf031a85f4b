"""Sinks: each gets one `Reading` after another, in its own thread. `SINKS` is the table of them.

A sink that is away, slow, or failing misses readings: the training never waits for it. The first miss is logged, and
their number at the end. Nothing is sent to a sink that was not named; an exporter listens on the loopback address
unless given another one.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from megaresume.checkpoint.metrics.figures import FIGURES, Reading
from megaresume.checkpoint.metrics.record import Lines
from megaresume.stream.errors import SetupError, UsageError, missing_package

log = logging.getLogger(__name__)

#: readings that wait for a sink; and seconds that the end of a run waits until it has taken them.
MAX_QUEUED, DRAIN_SECONDS = 16, 2.0


class Sink(Protocol):
    """Takes readings one after the other, in one thread."""

    def write(self, reading: Reading) -> None:
        """Take a reading. An error is logged once."""

    def close(self) -> None:
        """Called after the last reading."""


class Outlet:
    """A sink, and the thread that feeds it.

    Args:
        name: for the log.
        make: creates the sink, in that thread.
    """

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self._name, self._make = name, make
        self._queue: deque[Reading] = deque(maxlen=MAX_QUEUED)
        self._changed = threading.Condition()
        self._closing = self._done = False
        self._said = False
        #: number of readings that the sink never got.
        self.missed = 0
        self._thread = threading.Thread(target=self._run, name=f"megaresume-{name}", daemon=True)
        self._thread.start()

    def write(self, reading: Reading) -> None:
        """Queue a reading; drops the oldest if too many wait. Returns at once."""
        with self._changed:
            if len(self._queue) == MAX_QUEUED:
                self.missed += 1
                self._say(f"takes longer than the time between readings: {MAX_QUEUED} wait, and the oldest are dropped")
            self._queue.append(reading)
            self._changed.notify()

    def end(self) -> None:
        """Note that no more readings come. Returns at once."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self, timeout: float = DRAIN_SECONDS) -> None:
        """Wait a limited time for remaining readings, and log how many the sink missed."""
        self.end()
        with self._changed:
            self._changed.wait_for(lambda: self._done, max(timeout, 0.0))
            missed = self.missed + len(self._queue)
        if missed:
            log.warning("megaresume: metrics: %s missed %d readings", self._name, missed)

    def _say(self, what: str) -> None:
        if not self._said:
            self._said = True
            log.warning(
                "megaresume: metrics: %s %s; the training is not affected, and this is logged once", self._name, what
            )

    def _run(self) -> None:
        sink: Sink | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    break
                reading = self._queue.popleft()
            try:
                sink = sink or self._make()
                sink.write(reading)
            except Exception as error:  # noqa: BLE001  whatever the library of a sink raises must not reach the training
                self.missed += 1
                self._say(f"fails: {type(error).__name__}: {error}")
        if sink is not None:
            with contextlib.suppress(Exception):
                sink.close()
        with self._changed:
            self._done = True
            self._changed.notify_all()


class JsonLines:
    """JSON lines, one per reading."""

    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)

    def write(self, reading: Reading) -> None:
        """See `Sink`."""
        self._lines.append(reading.to_dict())

    def close(self) -> None:
        """See `Sink`."""
        self._lines.close()


class TensorBoard:
    """TensorBoard's event files."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory))

    def write(self, reading: Reading) -> None:
        """See `Sink`."""
        for name, number in reading.flat().items():
            self._writer.add_scalar(name, number, reading.step, walltime=reading.time)
        self._writer.flush()

    def close(self) -> None:
        """See `Sink`."""
        self._writer.close()


class OpenTelemetry:
    """The figures as OpenTelemetry instruments, read when one of its readers asks.

    Args:
        reader: from ``opentelemetry.sdk.metrics``.
        run: id of the run.
    """

    def __init__(self, reader: Any, run: str) -> None:
        from opentelemetry.metrics import Observation
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import Resource

        self._reading: Reading | None = None
        self._provider = MeterProvider(
            [reader],
            resource=Resource.create({"service.name": "megaresume", "service.instance.id": run}),
            shutdown_on_exit=False,
        )
        meter = self._provider.get_meter("megaresume")

        def observed(name: str, attribute: str) -> Callable[[Any], Iterable[Any]]:
            def observe(_options: Any) -> Iterable[Any]:
                value = None if self._reading is None else self._reading.figures.get(name)
                if value is None:
                    return []
                if isinstance(value, Mapping):
                    return [Observation(number, {attribute: label}) for label, number in value.items()]
                return [Observation(value)]

            return observe

        for figure in FIGURES:
            make = meter.create_observable_counter if figure.kind == "counter" else meter.create_observable_gauge
            make(figure.name, [observed(figure.name, figure.attribute)], figure.unit, figure.help)

    def write(self, reading: Reading) -> None:
        """See `Sink`."""
        self._reading = reading

    def close(self) -> None:
        """See `Sink`."""
        self._provider.shutdown(timeout_millis=DRAIN_SECONDS * 1000)


class Otlp(OpenTelemetry):
    """Sends each reading to a collector.

    Args:
        url: of the collector.
        run: see `OpenTelemetry`.
    """

    def __init__(self, url: str, run: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExportResult

        self._reader, self._failed = InMemoryMetricReader(), MetricExportResult.FAILURE
        self._exporter = OTLPMetricExporter(f"{url.rstrip('/')}/v1/metrics", timeout=10)
        self._url = url
        super().__init__(self._reader, run)

    def write(self, reading: Reading) -> None:
        """See `Sink`."""
        super().write(reading)
        found = self._reader.get_metrics_data()
        if found is not None and self._exporter.export(found) is self._failed:
            raise SetupError(
                "the OpenTelemetry collector did not accept the metrics",
                found=f"otlp={self._url}",
                action="check that a collector listens at this address, for OTLP over HTTP",
            )

    def close(self) -> None:
        """See `Sink`."""
        self._exporter.shutdown()
        super().close()


class Prometheus(OpenTelemetry):
    """An exporter that Prometheus scrapes.

    Args:
        where: ``[HOST:]PORT``.
        run: see `OpenTelemetry`.
    """

    def __init__(self, where: str, run: str) -> None:
        import prometheus_client
        from opentelemetry.exporter.prometheus import PrometheusMetricReader

        host, _, port = where.rpartition(":")
        registry = prometheus_client.CollectorRegistry()
        try:
            # It registers itself with the process's registry.
            reader = PrometheusMetricReader()
            prometheus_client.REGISTRY.unregister(reader._collector)
            registry.register(reader._collector)
        except KeyError:
            registry = prometheus_client.REGISTRY
        super().__init__(reader, run)
        self._server, _ = prometheus_client.start_http_server(int(port), host or "127.0.0.1", registry)

    def close(self) -> None:
        """See `Sink`."""
        self._server.shutdown()
        self._server.server_close()
        super().close()


class WeightsAndBiases:
    """A run of Weights & Biases; offline, unless WANDB_MODE is set.

    Args:
        directory: for its files.
        run: its name, the same after a resume.
    """

    def __init__(self, directory: Path, run: str) -> None:
        import wandb

        directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project="megaresume",
            id=run,
            resume="allow" if os.environ.get("WANDB_MODE") == "online" else None,
            dir=str(directory),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
            reinit="create_new",
        )

    def write(self, reading: Reading) -> None:
        """See `Sink`."""
        self._run.log(reading.flat() | {"megaresume/step": reading.step})

    def close(self) -> None:
        """See `Sink`."""
        self._run.finish()


class MLflow:
    """A run of MLflow, in files.

    Args:
        where: a directory, or the address of a server.
        run: its name.
    """

    def __init__(self, where: str, run: str) -> None:
        from mlflow import MlflowClient

        if "://" not in where:
            Path(where).mkdir(parents=True, exist_ok=True)
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            where = Path(where).absolute().as_uri()
        self._client = MlflowClient(tracking_uri=where)
        found = self._client.get_experiment_by_name("megaresume")
        experiment = self._client.create_experiment("megaresume") if found is None else found.experiment_id
        self._run = self._client.create_run(experiment, run_name=run).info.run_id

    def write(self, reading: Reading) -> None:
        """See `Sink`."""
        from mlflow.entities import Metric

        time, step = int(reading.time * 1000), reading.step
        metrics = [Metric(name, number, time, step) for name, number in reading.flat().items()]
        for first in range(0, len(metrics), 1000):  # the limit of one call
            self._client.log_batch(self._run, metrics=metrics[first : first + 1000])

    def close(self) -> None:
        """See `Sink`."""
        self._client.set_terminated(self._run)


class Function:
    """A user's function."""

    def __init__(self, function: Callable[[Reading], Any]) -> None:
        self._function = function

    def write(self, reading: Reading) -> None:
        """See `Sink`."""
        self._function(reading)

    def close(self) -> None:
        """See `Sink`."""


#: turns off the usage reports of packages, unless the environment already sets these variables.
_SILENT = {"WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}


def _check_port(where: str) -> None:
    port = where.rpartition(":")[2]
    if where and not port.isdigit():
        raise UsageError(
            "metrics: prometheus needs a port",
            found=f"prometheus={where}",
            expected="prometheus=9464",
            action="give a port, or ADDRESS:PORT",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkKind:
    """A row of `SINKS`."""

    #: for docs/metrics.md; a value after ``=`` says where.
    help: str
    #: creates a sink from the value after ``=``, or ""; that value, or a path in the run's directory; the id of the
    #: run.
    make: Callable[[str, Path, str], Sink]
    #: modules that it imports, from the extra ``metrics``.
    modules: tuple[str, ...] = ()
    #: raises UsageError for an invalid value after ``=``.
    check: Callable[[str], None] = lambda where: None


#: word -> sink; used for the words of ``metrics=``, the help of that setting and the table in docs/metrics.md.
SINKS = {
    "jsonl": SinkKind(
        help="lines of JSON in the run's directory, which are written whatever else is named. jsonl=FILE: to a file of "
        "their own as well",
        make=lambda where, own, run: JsonLines(own),
    ),
    "tensorboard": SinkKind(
        help="event files, in the run's directory or tensorboard=DIR",
        make=lambda where, own, run: TensorBoard(own),
        modules=("tensorboard",),
    ),
    "otlp": SinkKind(
        help="an OpenTelemetry collector, at http://localhost:4318 or otlp=URL",
        make=lambda where, own, run: Otlp(where or "http://localhost:4318", run),
        modules=("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    ),
    "prometheus": SinkKind(
        help="an exporter that Prometheus scrapes, on port 9464 of the loopback address, or prometheus=[HOST:]PORT",
        make=lambda where, own, run: Prometheus(where or "9464", run),
        modules=("opentelemetry.exporter.prometheus",),
        check=_check_port,
    ),
    "wandb": SinkKind(
        help="Weights & Biases, offline, in the run's directory or wandb=DIR",
        make=lambda where, own, run: WeightsAndBiases(own, run),
        modules=("wandb",),
    ),
    "mlflow": SinkKind(
        help="MLflow's files, in the run's directory or mlflow=DIR",
        make=lambda where, own, run: MLflow(where or str(own), run),
        modules=("mlflow",),
    ),
}


def check(word: str, where: str) -> None:
    """Check that a sink can be created, before the training, while an error is useful.

    Args:
        word: of `SINKS`.
        where: the value after ``=``.

    Raises:
        SetupError: its package is missing.
        UsageError: an invalid value.
    """
    kind = SINKS[word]
    for name, value in _SILENT.items():
        os.environ.setdefault(name, value)
    try:
        for name in kind.modules:
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        explained = missing_package(error, f"metrics: {word}", "metrics")
        raise error if explained is None else explained from error
    kind.check(where)


def close_all(outlets: Sequence[Outlet]) -> None:
    """Close sinks concurrently: waiting for all takes as long as for one."""
    deadline = time.monotonic() + DRAIN_SECONDS
    for outlet in outlets:
        outlet.end()
    for outlet in outlets:
        outlet.close(deadline - time.monotonic())


def outlet_of(word: str, where: str, directory: Path | None, run: str) -> Outlet:
    """A sink with its thread.

    Args:
        word: of `SINKS`.
        where: the value after ``=``.
        directory: for files without a given path; None: the run saves nowhere.
        run: id of the run.
    """
    own = Path(where) if where else (directory or Path("megaresume-metrics")) / word
    return Outlet(word, partial(SINKS[word].make, where, own, run))
