"""docs/metrics.md has the tables of today, and its alerts are rules of Prometheus over figures that there are."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaresume.checkpoint.metrics.figures import BY_NAME, FIGURES, Reading
from megaresume.checkpoint.metrics.goodput import CAUSES
from megaresume.checkpoint.metrics.sinks import outlet_of
from megaresume.cluster.processes import free_port
from tests.docs.figures_table import DOCUMENT, renewed
from tests.docs.grafana_dashboard import DASHBOARD, text

RULES = DOCUMENT.with_name("prometheus-rules.yml")


def test_the_tables_are_those_of_today() -> None:
    written = DOCUMENT.read_text()
    assert written == renewed(written), "run: python -m tests.docs.figures_table"


def test_every_cause_is_explained() -> None:
    assert re.findall(r"^\| `(\w+)` \| (?:from|waiting|standing|after)", DOCUMENT.read_text(), re.MULTILINE) == [
        *CAUSES
    ]


def test_rules_ask_for_figures_that_there_are() -> None:
    """By the names that the exporter gives them: the unit at the end, and ``total`` of a counter."""
    endings = {"s": "_seconds", "By": "_bytes"}
    known = {
        name.replace(".", "_") + endings.get(f.unit, "") + ("_total" if f.kind == "counter" else "")
        for name, f in BY_NAME.items()
    }
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert len(rules) == 10
    for rule in rules:
        assert {*re.findall(r"megaresume_\w+", rule["expr"])} <= known, rule


def test_the_dashboard_is_of_the_figures_of_today() -> None:
    assert DASHBOARD.read_text() == text(), "run: python -m tests.docs.grafana_dashboard"


@pytest.mark.process
def test_prometheus_answers_every_query_of_the_dashboard(tmp_path: Path) -> None:
    """Of what our exporter gives: none of them names a figure or a label that there is not."""
    if shutil.which("prometheus") is None:
        pytest.skip("needs Debian's prometheus")
    pytest.importorskip("opentelemetry.exporter.prometheus")
    ports = free_port(), free_port()
    outlet = outlet_of("prometheus", str(ports[0]), tmp_path, "0123456789abcdef")
    figures: dict[str, Any] = {f.name: {"web": 0.5, "code": 0.5} if f.attribute else 1.0 for f in FIGURES}
    outlet.write(Reading(time=time.time(), step=1, samples=8, figures=figures))
    scraped = {"job_name": "run", "scrape_interval": "1s", "static_configs": [{"targets": [f"127.0.0.1:{ports[0]}"]}]}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [scraped]}))
    words = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    server = subprocess.Popen(
        [*words, f"--web.listen-address=127.0.0.1:{ports[1]}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def lines(query: str) -> int:
        """How many lines its graph has."""
        query = query.replace("$instance", ".*").replace("$__rate_interval", "1m")
        address = f"http://127.0.0.1:{ports[1]}/api/v1/query?" + urllib.parse.urlencode({"query": query})
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            answer = json.loads(urllib.request.urlopen(address).read())
            assert answer["status"] == "success"
            return len(answer["data"]["result"])
        return 0

    try:
        deadline = time.monotonic() + 120
        panels = [one for one in json.loads(DASHBOARD.read_text())["panels"] if one["type"] != "row"]
        wanted = {
            one["targets"][0]["expr"]: 2 if "{{" in str(one) and "instance}}" not in str(one) else 1 for one in panels
        }
        assert len(wanted) == len(FIGURES)
        while (found := {query: lines(query) for query in wanted}) != wanted:
            assert server.poll() is None and time.monotonic() < deadline, [q for q in wanted if found[q] != wanted[q]]
            time.sleep(0.5)
    finally:
        server.kill()
        server.wait()
        outlet.close()


@pytest.mark.process
def test_prometheus_takes_the_rules() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("needs Debian's prometheus")
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
