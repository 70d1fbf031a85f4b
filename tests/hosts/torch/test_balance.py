"""Balanced ranks in a real loop on gloo: killed, and resumed on another layout.

What a rank trained it writes down itself: `program.py`. What a sample costs is counted here, from its segments.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import megaresume
from megaresume.program import main
from tests.hosts.conftest import write_corpus
from tests.hosts.torch.program import run
from tests.hosts.torch.record import launch, lines, trained

pytestmark = pytest.mark.process

PROGRAM = Path(__file__).with_name("program.py")
BALANCE = {"objective": "step", "token_cost": 8}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("text")
    write_corpus(directory / "web", documents=400, seed=1)
    data = "seed: 7\nseq_length: 64\npacking: best_fit\nsources:\n  web: {path: web}\n"
    (directory / "data.yaml").write_text(data)
    return str(directory / "data.yaml")


@pytest.fixture(scope="module")
def killed(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks under DDP, four samples each in a step, killed in the middle of the save of step 6; then one rank, with
    other micro-batches, and in the end other global batches."""
    directory = tmp_path_factory.mktemp("killed") / "run"
    options: dict[str, Any] = {"data": text, "balance": BALANCE, "save_every": 3}
    done = launch(PROGRAM, directory, 2, batch=2, steps=12, kill=("save", 6), **options)
    assert done.returncode != 0 and "SIGKILL" in done.stderr, done.stderr[-3000:]
    other = options | {"balance": {"objective": "micro-step"}, "num_workers": 1}
    run(directory, attempt=2, batch=2, accumulation=4, steps=6, **other)
    run(directory, attempt=3, batch=1, accumulation=4, steps=9, **other)
    return directory


def test_nothing_is_repeated_and_nothing_skipped(killed: Path) -> None:
    steps = trained(killed)
    assert [sorted(step) for step in steps] == [
        *(list(range(8 * k, 8 * k + 8)) for k in range(6)),
        *(list(range(48 + 4 * k, 52 + 4 * k)) for k in range(3)),
    ]
    assert steps != [sorted(step) for step in steps]


def test_ranks_have_as_many_samples_and_as_much_to_do(killed: Path, text: str) -> None:
    shares: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for line in lines(killed):
        if line["attempt"] == 1:
            shares[line["step"]][line["rank"]] += line["items"]
    stream = megaresume.open_stream(text)

    def cost(samples: list[int]) -> int:
        return sum(s.length * (s.length + 8) for n in samples for s in stream.plan(n, n + 1).segments(n))

    balanced = as_they_come = 0
    for step, ranks in shares.items():
        assert [len(ranks[rank]) for rank in (0, 1)] == [4, 4]
        balanced += abs(cost(ranks[0]) - cost(ranks[1]))
        first = 8 * (step - 1)
        plain = [first + k for k in (0, 1, 4, 5)], [first + k for k in (2, 3, 6, 7)]
        as_they_come += abs(cost(plain[0]) - cost(plain[1]))
    assert len(shares) == 6 and balanced < as_they_come / 2


def test_trace_knows_who_trained_what(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = {(line["step"], line["rank"]): line["attempt"] for line in sorted(lines(killed), key=lambda n: n["attempt"])}
    trained_by: dict[int, tuple[int, int, int]] = {}
    counts: dict[tuple[int, int], int] = defaultdict(int)
    of_step = {step: max(a for (s, _), a in last.items() if s == step) for step, _ in last}
    for line in lines(killed):
        if line["attempt"] == of_step[line["step"]]:
            place = line["step"], line["rank"]
            trained_by |= dict.fromkeys(line["items"], (*place, counts[place]))
            counts[place] += 1
    assert main(["trace", str(killed), "--samples", "0:60", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["sample"]: (row["step"], row["rank"], row["micro_batch"]) for row in rows} == trained_by
    assert main(["verify", str(killed)]) == 0
