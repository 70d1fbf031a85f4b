"""docs/metrics.md has the tables of today, and its alerts are rules of Prometheus over figures that there are."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import yaml

from megaresume.checkpoint.goodput import CAUSES
from megaresume.checkpoint.meter.figures import BY_NAME
from tests.docs.figures_table import DOCUMENT, renewed

RULES = DOCUMENT.with_name("prometheus-rules.yml")


def test_the_tables_are_those_of_today() -> None:
    text = DOCUMENT.read_text()
    assert text == renewed(text), "run: python -m tests.docs.figures_table"


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
    assert len(rules) == 9
    for rule in rules:
        assert {*re.findall(r"megaresume_\w+", rule["expr"])} <= known, rule


@pytest.mark.process
def test_prometheus_takes_the_rules() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("needs Debian's prometheus")
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
