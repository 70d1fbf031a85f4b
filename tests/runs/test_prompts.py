"""`megaresume verify` and `trace --find` of a run of reinforcement learning, whose ledger of prompts is real."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megaresume import Prompts
from megaresume.stream.errors import StateError
from tests.cli.conftest import megaresume
from tests.hosts.prompts.simulated import Texts


def made(directory: Path) -> Prompts:
    """Over twenty prompts."""
    return Prompts(Texts("data", 20), ledger=directory / "prompts.jsonl")


def save(directory: Path, prompts: Prompts) -> None:
    """As beside the weights of a checkpoint."""
    checkpoint = directory / f"checkpoint-{prompts.step}"
    checkpoint.mkdir()
    state = {"step": prompts.step, "prompts": prompts.state_dict()}
    (checkpoint / "prompts.json").write_text(json.dumps(state))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two checkpoints, and a part between them that a crash has thrown away."""
    prompts = made(tmp_path)
    issued = prompts.issue(8)
    for prompt in issued[:5]:
        assert prompts.done(prompt.ordinal, prompt.ticket)
    prompts.trained(1, [0, 3])
    prompts.drop(7, "filtered")
    save(tmp_path, prompts)
    prompts.trained(2, [1, 2])
    prompts.state_dict()  # and killed
    again = made(tmp_path)
    again.load_state_dict(json.loads((tmp_path / "checkpoint-1" / "prompts.json").read_text())["prompts"])
    for prompt in again.issue(3):
        assert again.done(prompt.ordinal, prompt.ticket)
    again.trained(3, [4, 2])
    save(tmp_path, again)
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write('{"format": "megaresume.prom')  # and killed while it wrote
    return tmp_path


def test_it_holds(run: Path) -> None:
    done = megaresume("verify", run)
    assert done.returncode == 0
    assert "8 issued: 4 trained, 3 in flight, 1 dropped (filtered)" in done.stdout
    assert "2 states beside checkpoints are as the ledger says" in done.stdout
    found = json.loads(megaresume("verify", run, "--json").stdout)
    assert (found["holds"], found["trained"], found["in_flight"], found["dropped"]) == (True, 4, 3, {"filtered": 1})
    assert len(found["torn"]) == 1


def test_what_became_of_a_prompt(run: Path) -> None:
    done = megaresume("trace", run, "--find", "0,2,1,7,9")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "prompt 0: trained at step 1",
        "prompt 2: trained at step 3",
        "prompt 1: in flight",
        "prompt 7: dropped (filtered)",
        "prompt 9: not issued",
    ]
    assert megaresume("trace", run, "--find", "web:3").returncode == 2


def test_what_is_wrong_is_found(run: Path) -> None:
    ledger, state = run / "prompts.jsonl", run / "checkpoint-3" / "prompts.json"
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(lines[0] + lines[2].replace(b'"3": ', b'"4": '))
    assert megaresume("verify", run).returncode == 1  # a line that was changed
    ledger.write_bytes(b"".join(lines[1:]))
    with pytest.raises(StateError, match="has a gap"):
        Prompts(Texts("data", 20), ledger=ledger).load_state_dict(json.loads(state.read_text())["prompts"]) or prove(
            run
        )
    ledger.write_bytes(b"".join(lines))
    changed = json.loads(state.read_text())
    changed["prompts"]["open"][1] += 1
    state.write_text(json.dumps(changed))
    done = megaresume("verify", run)
    assert done.returncode == 1
    assert "WRONG      checkpoint-3: what is in flight is not as the ledger says" in done.stdout
    shutil.rmtree(run / "checkpoint-3")
    assert "up to checkpoint-1, step 1" in megaresume("verify", run).stdout
    assert "in flight" in megaresume("trace", run, "--find", "2").stdout


def test_a_report_of_them(run: Path) -> None:
    assert megaresume("report", run).returncode == 0
    page = (run / "report.html").read_text()
    assert "8 prompts were issued. Every one is accounted for once." in page
    assert "dropped: filtered" in page and "<svg" in page
    found = json.loads(megaresume("report", run, "--json").stdout)
    assert (found["trained"], found["in_flight"], found["steps"]) == (4, 3, {"1": 2, "3": 2})


def test_a_run_that_trains_them_is_followed(run: Path) -> None:
    done = megaresume("top", run, "--once")
    assert done.returncode == 0
    assert "8 issued: 4 trained, 3 in flight, 1 dropped (filtered)" in done.stdout
    assert "step        3, " in done.stdout and "runs" in done.stdout.splitlines()[0]
    found = json.loads(megaresume("top", run, "--once", "--json").stdout)
    assert (found["step"], found["prompts"]["trained"]) == (3, 4)


def test_a_ledger_that_came_later(run: Path) -> None:
    (run / "prompts.jsonl").unlink()
    prompts = Prompts(Texts("data", 20), rollouts=2, max_staleness=3)
    for prompt in prompts.issue(4):
        assert all(prompts.done(prompt.ordinal, prompt.ticket, rollout, version=0) for rollout in range(2))
    prompts.trained(1, [0])
    shutil.rmtree(run / "checkpoint-1")
    save(run, prompts)
    later = Prompts(Texts("data", 20), rollouts=2, max_staleness=3, ledger=run / "prompts.jsonl")
    later.load_state_dict(prompts.state_dict())
    for prompt in later.issue(2):
        assert all(later.done(prompt.ordinal, prompt.ticket, rollout, version=0) for rollout in range(2))
    later.advance(1)
    later.trained(4, [1, 2])
    save(run, later)
    shutil.rmtree(run / "checkpoint-3")
    said = megaresume("verify", run)
    assert said.returncode == 0
    assert "4 issued: 2 trained, 1 in flight, 0 dropped, 1 settled before the ledger began" in said.stdout
    assert "of 4 rollouts trained, older than the weights: 100.0 % by 1 versions" in said.stdout
    assert "1 states beside checkpoints are as the ledger says, 1 were taken without a ledger" in said.stdout


def prove(directory: Path) -> None:
    """In this process, for its error."""
    from megaresume.runs import prompts

    prompts.prove(directory)
