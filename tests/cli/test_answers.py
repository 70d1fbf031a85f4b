"""What every command that asks about a run prints, as text and as JSON, against the files in `answers`.

`--regenerate` writes them anew. What differs from run to run stands there as a word: paths, times, ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import SavedRun, megaresume

GOLDEN = Path(__file__).parent / "answers"

#: name of the file -> command lines; SAVE, DATA and NEW are paths.
WHOLE = {
    "inspect": ["inspect SAVE", "inspect SAVE --checksums --last 1", "inspect SAVE/global_step8"],
    "latest": ["latest SAVE", "latest SAVE --iteration", "latest SAVE --tag"],
    "plan": [
        "plan SAVE --train-iters 100",
        "plan SAVE --dp 4 --micro-batch-size 2 --train-iters 10",
        "plan SAVE --data NEW --train-iters 100",
        "plan SAVE --data NEW --on-change stage --global-batch-size 16 --dp 3",
        "plan SAVE --train-iters 100 --skip-samples 100-120",
        "plan SAVE --mtbf 6h --save-time 30s --step-time 2s --restart-time 5m",
    ],
    "trace": [
        "trace SAVE --steps 2",
        "trace SAVE --samples 95:98 --text",
        "trace SAVE --find web:3,code:0",
        "trace SAVE --find code:5 --until-step 40",
    ],
    "verify": [
        "verify SAVE",
        "verify SAVE --from 4 --to 8",
        "verify SAVE --content",
        "verify --loss A B",
        "verify --loss A B --tolerance 0.5",
    ],
    "doctor": ["doctor SAVE --dp 2", "doctor SAVE --dp 3 --zero-stage 1"],
    "report": ["report SAVE --log A"],
    "stream": ["stream DATA --samples 0:2", "stream DATA --samples 10:30 --summary"],
}
#: of a run whose newest checkpoint lost a byte, and one line of whose ledger is damaged.
DAMAGED = {
    "damaged": [
        "inspect SAVE",
        "latest SAVE",
        "plan SAVE --train-iters 100",
        "verify SAVE",
        "report SAVE",
        "trace SAVE --steps 2",
    ],
    "damaged-doctor": ["doctor SAVE"],
    "nothing": ["inspect EMPTY", "latest EMPTY", "latest EMPTY --allow-none", "plan EMPTY", "report EMPTY"],
}


@pytest.fixture
def answer(run: SavedRun, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Runs a command line, and gives what does not differ from run to run."""
    ids = set()
    for path in (run.save / "megaresume").glob("*.json"):
        ids.update(re.findall(r'"(?:run|save_id)": ?"([0-9a-f]+)"', path.read_text()))
    for line in (run.save / "megaresume" / "ledger.jsonl").read_text().splitlines():
        ids.update(re.findall(r'"start": ?"([0-9a-f]{16})"', line))
    (tmp_path / "empty").mkdir()
    new = tmp_path / "new.yaml"
    new.write_text(run.data.read_text().replace("weight: 0.7", "weight: 0.5"))
    for name, more in (("a", 0.0), ("b", 0.25)):
        lines = [
            {"event": "step", "step": step, "loss": 0.0, "loss_hex": (4 / step + more * (step > 5)).hex()}
            for step in range(1, 13)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths = {"SAVE": run.save, "DATA": run.data, "NEW": new, "EMPTY": tmp_path / "empty"}
    paths |= {"A": tmp_path / "a.jsonl", "B": tmp_path / "b.jsonl"}

    def words(text: str) -> str:
        text = text.replace(str(tmp_path), "TMP")
        for value in ids:
            text = text.replace(value, "ID")
        text = re.sub(r"\b[0-9a-f]{32}\b", "CHECKSUM", text)
        text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.\d]*(\+00:00|Z)?", "TIME", text)
        text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", text)
        text = re.sub(r'("(?:save|span|startup)": )\d+\.\d+|("step": )0\.\d+', r"\1\2SECONDS", text)
        return re.sub(r'("\w*seconds": )[\d.e-]+|(\d+\.\d s)(?=\n| )', r"\1SECONDS", text)

    def ask(line: str) -> dict[str, Any]:
        command = [re.sub(r"^[A-Z]+", lambda m: str(paths[m[0]]), word) for word in line.split(" ")]
        done = megaresume(*command)
        out, status = done.stdout, done.returncode
        if command[0] == "doctor":  # without what it says of this machine
            out, status = of_checkpoints(out), 0
        return {"status": status, "out": words(out), "err": words(done.stderr)}

    return ask


def of_checkpoints(out: str) -> str:
    """The part of `doctor` on the directory."""
    out = re.sub(r"saved [\d.]+ s ago", "saved AGO", out)
    if out.startswith("{"):
        return json.dumps([check for check in json.loads(out)["checks"] if check["area"] == "checkpoints"]) + "\n"
    lines = out.partition("\ncheckpoints\n")[2].partition("\n\n")[0].splitlines()
    return "".join(re.sub(r" {3,}", "  ", line) + "\n" for line in lines)


def _lines_of(text: str) -> str:
    """A value of JSON, with a line for each of its parts."""
    value = json.loads(text)
    named = value.items() if isinstance(value, dict) else [("", part) for part in value]
    return "".join(f"  {name} {json.dumps(part, sort_keys=True)}\n" for name, part in sorted(named, key=lambda n: n[0]))


def check(name: str, lines: list[str], answer: Callable[[str], dict[str, Any]], regenerate: bool) -> None:
    blocks = []
    for line in lines:
        for form in ("", " --json"):
            if form and line.endswith(("--iteration", "--tag", "--text")):
                continue
            found = answer(line + form)
            out = found["out"]
            if form:
                out = "".join(map(_lines_of, re.sub("SECONDS", "0", out).splitlines()))
            err = f"-- standard error\n{found['err']}" if found["err"] else ""
            blocks.append(f"$ megaresume {line}{form}\n{out}{err}-- {found['status']}\n")
    path = GOLDEN / f"{name}.txt"
    text = "\n".join(blocks)
    if regenerate:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def _named(lines: dict[str, list[str]]) -> list[Any]:
    """`doctor` tries a lock in another process."""
    needs = {name for name in lines if any(line.startswith("doctor") for line in lines[name])}
    return [pytest.param(name, marks=[pytest.mark.process] if name in needs else []) for name in lines]


@pytest.mark.parametrize("name", _named(WHOLE))
def test_of_a_run(name: str, answer: Any, request: pytest.FixtureRequest) -> None:
    check(name, WHOLE[name], answer, request.config.getoption("--regenerate"))


@pytest.mark.parametrize("name", _named(DAMAGED))
def test_of_a_run_that_is_damaged(name: str, run: SavedRun, answer: Any, request: pytest.FixtureRequest) -> None:
    (run.save / "global_step12" / "mp_rank_00_model_states.pt").write_bytes(b"w")
    ledger = run.save / "megaresume" / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b'"samples": 64', b'"samples": 65'))
    check(name, DAMAGED[name], answer, request.config.getoption("--regenerate"))
