"""What a run had done after its last save, as the store tells once its machine is lost; and as it recorded itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.release import release

pytestmark = pytest.mark.process
REPOSITORY = Path(__file__).parents[3]

#: saves after steps 4 and 8; the machine is lost after 7.
PROGRAM = """
import json, shutil, sys
from tests.checkpoint.store.nodes import BATCH, Cluster
cluster = Cluster(1)
options = {"pause": 0.3, "save_every": 4, "position_every": 1}
from tests.checkpoint.store.test_position import ask, recorded
try:
    statuses = cluster.start(NODES, 10, die=7, **options)
    record = recorded(cluster.record)
    for disk in cluster.disks:
        shutil.rmtree(disk, ignore_errors=True)
    found = {"statuses": statuses, "record": record, "said": cluster.said()}
    found |= {"top": ask("top", cluster.url, "--once", "--json"), "report": ask("report", cluster.url, "--json")}
    found["again"] = cluster.start(NODES, 9, **options)
    found["after"] = ask("report", cluster.url, "--json")
    print("FOUND", json.dumps(found))
finally:
    cluster.close()
"""


def ask(command: str, url: str, *more: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "megaresume", command, url, *more], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def recorded(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "rank_0").read_text().splitlines()]


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=release("`[2]`: two nodes", "the same, `[1]`"))])
def test_steps_after_the_last_save_are_known_and_lost(nodes: int) -> None:
    pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    program = PROGRAM.replace("NODES", str(nodes))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, env=dict(os.environ))
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout + done.stderr
    found = json.loads(lines[0].removeprefix("FOUND "))
    done_steps = [line["done"] for line in found["record"] if "done" in line]
    assert done_steps == list(range(1, 8)), found["said"]
    assert (found["top"]["step"], found["top"]["samples"], found["top"]["checkpoint"]) == (7, 7 * 12, 4)
    assert (found["report"]["step"], found["report"]["unsaved"]) == (4, 3)
    assert found["again"] == [0] * nodes, found["said"]
    _, second = found["after"]["starts"]
    assert (second["step"], second["lost"], second["lost_is_exact"]) == (4, 3, True)
    figures = found["after"]["figures"]
    assert figures["repeated"] == 3 * 12
    times = {line["done"]: line["time"] for line in found["record"] if "done" in line}
    saved = next(line["time"] for line in found["record"] if "saved" in line)
    assert figures["badput"]["lost"] == pytest.approx(times[7] - saved, abs=0.5)
