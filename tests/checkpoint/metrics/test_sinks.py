"""Each sink is told by its real package, and what it has written is read again by that package."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.metrics.figures import FIGURES, Reading
from megaresume.checkpoint.metrics.sinks import (
    DRAIN_SECONDS,
    MAX_QUEUED,
    SINKS,
    Function,
    Outlet,
    SinkKind,
    check,
    close_all,
    outlet_of,
)
from megaresume.checkpoint.metrics.words import EVERY, OPTIONS, WORDS, MeterOptions, parse
from megaresume.cluster.processes import free_port
from megaresume.stream.errors import SetupError, UsageError

READINGS = [
    Reading(
        time=1.7e9 + step,
        step=step,
        samples=8 * step,
        figures={
            "megaresume.samples": 8 * step,
            "megaresume.goodput": 0.5,
            "megaresume.data.wait": 0.25 * step,
            "megaresume.source.tokens": {"web": 100 * step, "code": 10 * step},
        },
    )
    for step in (1, 2, 3)
]
TOKENS = "megaresume/source/tokens/web"


def tell(word: str, where: str, directory: Path) -> None:
    outlet = outlet_of(word, where, directory, "0123456789abcdef")
    for reading in READINGS:
        outlet.write(reading)
    outlet.close(60)
    assert not outlet.missed


def until(is_so: Any) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_json_lines(tmp_path: Path) -> None:
    tell("jsonl", str(tmp_path / "own.jsonl"), tmp_path)
    assert [json.loads(line) for line in (tmp_path / "own.jsonl").open()] == [r.to_dict() for r in READINGS]


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tell("tensorboard", "", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value, e.wall_time) for e in events.Scalars(TOKENS)] == [
        (r.step, 100 * r.step, r.time) for r in READINGS
    ]


@pytest.mark.process
def test_weights_and_biases(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    tell("wandb", "", tmp_path)
    found = list((tmp_path / "wandb").rglob("*.wandb"))
    assert len(found) == 1
    # Another process writes the file; it may close it only after `finish` has returned.
    until(lambda: TOKENS.encode() in found[0].read_bytes())


@pytest.mark.process  # its import asks `uname`
def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    tell("mlflow", "", tmp_path)
    client = mlflow.MlflowClient((tmp_path / "mlflow").as_uri())
    [run] = client.search_runs([client.get_experiment_by_name("megaresume").experiment_id])
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, TOKENS)] == [
        (r.step, 100 * r.step) for r in READINGS
    ]


def test_prometheus_listens_on_the_loopback_address(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.prometheus")
    port = free_port()
    outlet = outlet_of("prometheus", str(port), tmp_path, "0123456789abcdef")
    outlet.write(READINGS[-1])

    def fetched() -> str:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        except OSError:
            return ""

    until(lambda: "megaresume_goodput" in fetched())
    text = fetched()
    assert "megaresume_source_tokens{" in text
    assert 'source="web"' in text
    assert "megaresume_data_wait_seconds_total" in text
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert [a for a in listening if a.endswith(f":{port:04X}") and not a.startswith("0100007F")] == []
    outlet.close()
    until(lambda: not fetched())


def test_a_collector_of_opentelemetry(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    got: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            import gzip

            data = self.rfile.read(int(self.headers["Content-Length"]))
            data = gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data
            got.append(ExportMetricsServiceRequest.FromString(data))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tell("otlp", f"http://127.0.0.1:{server.server_port}", tmp_path)
    server.shutdown()
    assert len(got) == len(READINGS)
    metrics = {m.name: m for m in got[-1].resource_metrics[0].scope_metrics[0].metrics}
    by_name = {figure.name: figure for figure in FIGURES}
    assert {name: m.unit for name, m in metrics.items()} == {name: by_name[name].unit for name in metrics}
    points = metrics["megaresume.source.tokens"].gauge.data_points
    assert {p.attributes[0].value.string_value: p.as_int for p in points} == {"web": 300, "code": 30}
    assert metrics["megaresume.data.wait"].sum.is_monotonic


class Bad:
    """A sink that waits, or fails."""

    def __init__(self, gate: threading.Event | None) -> None:
        self.gate = gate

    def write(self, reading: Reading) -> None:
        if self.gate is None:
            raise ConnectionRefusedError("nobody listens")
        self.gate.wait()

    def close(self) -> None:
        """Nothing to do."""


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_sink_that_is_away_or_slow_is_not_waited_for_and_said_once(
    is_slow: bool, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event() if is_slow else None
    with caplog.at_level(logging.WARNING):
        outlet = Outlet("there", lambda: Bad(gate))
        for _ in range(5 * MAX_QUEUED):
            begin = time.perf_counter()
            outlet.write(READINGS[0])
            assert time.perf_counter() - begin < 1
        until(lambda: outlet.missed >= MAX_QUEUED)
    assert len(caplog.records) == 1
    assert "the training is not affected" in caplog.text
    if gate is not None:
        gate.set()
    outlet.close(60)
    assert caplog.messages[1:] == [f"megaresume: metrics: there missed {outlet.missed} readings"]


def test_a_collector_that_is_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    outlet = outlet_of("otlp", f"http://127.0.0.1:{free_port()}", tmp_path, "0123456789abcdef")
    outlet.write(READINGS[0])
    outlet.close(0.1)  # does not wait for it
    until(lambda: outlet.missed)
    until(lambda: "the OpenTelemetry collector did not accept the metrics" in caplog.text)


def test_sinks_are_closed_at_the_same_time(caplog: pytest.LogCaptureFixture) -> None:
    """Three that never take what they were given: the end of a run waits for all of them as long as for one."""
    never = threading.Event()
    outlets = [Outlet(f"slow {k}", lambda: Function(lambda _: never.wait())) for k in range(3)]
    for outlet in outlets:
        outlet.write(READINGS[0])
        outlet.write(READINGS[1])
    begin = time.monotonic()
    close_all(outlets)
    assert DRAIN_SECONDS <= time.monotonic() - begin < 2 * DRAIN_SECONDS
    assert [record.getMessage().count("missed 1 readings") for record in caplog.records] == [1, 1, 1]
    never.set()


def test_words() -> None:
    assert parse(True).sinks == (("jsonl", ""),)
    assert parse("jsonl tensorboard=a/b every=2").sinks == (("jsonl", ""), ("tensorboard", "a/b"))
    assert parse("jsonl every=2").every == 2
    assert parse(["otlp=http://x:1", print]).functions == (print,)
    assert parse(print).every == EVERY
    assert parse("jsonl trainer").trainer


@pytest.mark.parametrize("word", WORDS)
def test_every_word_is_a_sink_or_an_option(word: str) -> None:
    found = parse(f"{word}=2" if word == "every" else word)
    assert found.sinks == (((word, ""),) if word in SINKS else ())
    assert (found != MeterOptions(found.sinks)) == (word in OPTIONS)


def test_a_row_of_the_table_is_all_that_a_sink_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Reading] = []
    made: list[tuple[str, Path, str]] = []

    def make(where: str, own: Path, run: str) -> Function:
        made.append((where, own, run))
        return Function(told.append)

    monkeypatch.setitem(SINKS, "mine", SinkKind(help="a sink", make=make))
    [(word, where)] = parse("mine").sinks
    check(word, where)
    tell(word, where, tmp_path)
    assert (made, told) == ([("", tmp_path / "mine", "0123456789abcdef")], READINGS)


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(SetupError, match=r"megaresume\[metrics\]"):
        check("mlflow", "")


@pytest.mark.parametrize("where", ["here", "0.0.0.0:", "0.0.0.0:x"])
def test_a_port_that_is_none(where: str) -> None:
    with pytest.raises(UsageError, match="needs a port"):
        SINKS["prometheus"].check(where)


@pytest.mark.parametrize("words", ["tensorbord", "every=soon", "every=0", "trainer=x"])
def test_words_that_mean_nothing(words: str) -> None:
    with pytest.raises(UsageError) as found:
        parse(words)
    assert words.partition("=")[0] in str(found.value)


def test_a_function_is_told() -> None:
    told: list[Reading] = []
    outlet = Outlet("a function", lambda: Function(told.append))
    outlet.write(READINGS[0])
    outlet.close(60)
    assert told == [READINGS[0]]
