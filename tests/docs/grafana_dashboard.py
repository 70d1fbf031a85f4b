"""docs/grafana-dashboard.json, made of the table of figures: ``python -m tests.docs.grafana_dashboard`` writes it anew.

A row for each part of a figure's name, a panel for each figure; by source or cause, a line for each.
"""

from __future__ import annotations

import json
from typing import Any

from megaresume.checkpoint.metrics.figures import FIGURES, Figure
from tests.docs.figures_table import DOCUMENT

DASHBOARD = DOCUMENT.with_name("grafana-dashboard.json")
#: unit of UCUM -> of Grafana, and what the exporter puts at the end of the name.
UNITS = {"s": ("s", "_seconds"), "By": ("bytes", "_bytes"), "1": ("none", "")}
#: of these, from 0 to 1.
PARTS = ("megaresume.goodput", "megaresume.fill", "megaresume.source.share", "megaresume.source.weight")
ROWS = {"run": "The run", "source": "Sources", "data": "Data", "checkpoint": "Checkpoints"}
WIDTH, HEIGHT = 8, 7
#: of the run that is shown, of those that Prometheus scrapes.
CHOSEN = '{instance=~"$instance"}'


def exported(figure: Figure) -> str:
    """The name that the exporter for Prometheus gives a figure."""
    name = figure.name.replace(".", "_") + UNITS.get(figure.unit, ("", ""))[1]
    return name + ("_total" if figure.kind == "counter" else "")


def query(figure: Figure) -> str:
    """Of a counter, how much it grows in a second."""
    name = exported(figure) + CHOSEN
    return f"rate({name}[$__rate_interval])" if figure.kind == "counter" else name


def panel(figure: Figure, number: int, x: int, y: int) -> dict[str, Any]:
    """A graph of a figure."""
    unit = "percentunit" if figure.name in PARTS else UNITS.get(figure.unit, ("short", ""))[0]
    each = " by {{" + figure.attribute + "}}" if figure.attribute else ""
    return {
        "id": number,
        "type": "timeseries",
        "title": figure.name.removeprefix("megaresume.") + (" per second" if figure.kind == "counter" else ""),
        "description": figure.help,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [{"refId": "A", "expr": query(figure), "legendFormat": each.removeprefix(" by ") or "{{instance}}"}],
    }


def dashboard() -> dict[str, Any]:
    """What Grafana imports."""
    panels: list[dict[str, Any]] = []
    y = 0
    for part, title in ROWS.items():
        mine = [f for f in FIGURES if (f.name.split(".")[1] if f.name.split(".")[1] in ROWS else "run") == part]
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}}
        )
        y += 1
        for k, figure in enumerate(mine):
            x, row = k % 3 * WIDTH, k // 3 * HEIGHT
            panels.append(panel(figure, len(panels) + 1, x, y + row))
        y += -(-len(mine) // 3) * HEIGHT
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus"},
        {
            "name": "instance",
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": "label_values(megaresume_step, instance)",
            "refresh": 2,
            "includeAll": True,
        },
    ]
    return {
        "title": "megaresume",
        "uid": "megaresume",
        "schemaVersion": 39,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": variables},
        "panels": panels,
    }


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    DASHBOARD.write_text(text())
