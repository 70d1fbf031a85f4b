"""``megaresume verify --loss``: what is read from every kind of log, and what is a difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaresume.program import main
from megaresume.runs.losses import compare_losses, read_losses
from megaresume.stream.errors import UsageError

#: as Megatron-LM's training_log prints it, from 0.8 on with the time in front.
MEGATRON = (
    " [2025-11-21 10:00:00.123456] iteration {:8d}/     100 | consumed samples: {:12d} | elapsed time per iteration "
    "(ms): 1234.5 | learning rate: 1.500000E-04 | global batch size:    16 | lm loss: {} | loss scale: 1.0 | "
    "grad norm: 1.234 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
DEEPSPEED = "steps: {} loss: {} iter time (s): 0.511 samples/sec: 31.319\n"
VALIDATION = (
    " validation loss at iteration 2 | lm loss value: 9.250000E+00 | lm loss PPL: 1.040457E+04 | \n"
    " validation loss at iteration 2 on code | lm loss value: 3.125000E+00 | tokens: 4000 |\n"
)


def megatron(path: Path, losses: dict[int, float]) -> Path:
    path.write_text("".join(MEGATRON.format(n, 16 * n, f"{x:.6E}") for n, x in losses.items()) + VALIDATION)
    return path


def ours(path: Path, losses: dict[int, float], *starts: int) -> Path:
    lines = []
    for n, x in losses.items():
        if n - 1 in (0, *starts):
            lines.append({"event": "start", "step": n - 1, "samples": 0})
        lines.append({"event": "step", "step": n, "loss": x, "loss_hex": float(x).hex()})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def verify(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    status = main(["verify", "--loss", *map(str, words)])
    return status, capsys.readouterr().out


def test_one_bit_is_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = {n: 10 / n for n in range(1, 9)}
    one = ours(tmp_path / "a", losses)
    assert verify(capsys, one, ours(tmp_path / "b", losses))[0] == 0
    other = ours(tmp_path / "b", losses | {5: 2.0000000000000004, 7: 2.0})
    status, text = verify(capsys, one, other)
    assert status == 1 and "8 steps in both, 6 with the same loss bit for bit" in text
    assert "first difference: step 5, 2.0 and 2.0000000000000004, 4.441e-16 apart" in text
    assert "largest difference: step 7" in text
    assert verify(capsys, one, other, "--tolerance", "0.571428571428572")[0] == 0
    assert verify(capsys, one, other, "--tolerance", "0.57")[0] == 1


def test_logs_of_megatron_and_deepspeed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = {n: 10 / n for n in range(1, 9)}
    exact, printed = ours(tmp_path / "a", losses), megatron(tmp_path / "b", losses)
    pipeline = tmp_path / "c"
    pipeline.write_text("".join(DEEPSPEED.format(n, f"{x:0.4f}") for n, x in losses.items()))
    assert len(read_losses(printed).steps) == len(read_losses(pipeline).steps) == 8
    # An exact loss is compared as the other log prints it.
    for other in (printed, pipeline):
        status, text = verify(capsys, exact, other)
        assert status == 0 and "8 with the same loss as printed" in text, text
    status, _ = verify(capsys, exact, megatron(tmp_path / "d", losses | {3: 3.33334}))
    assert status == 1
    assert {name: loss[2].value for name, loss in read_losses(printed).validations.items()} == {
        "valid": 9.25,
        "code": 3.125,
    }


def test_the_last_line_of_a_step_counts(tmp_path: Path) -> None:
    text = "".join(MEGATRON.format(n, 0, f"{x:.6E}") for n, x in [(1, 5), (2, 4), (3, 9), (4, 9), (3, 3), (4, 2)])
    (tmp_path / "log").write_text(text)
    log = read_losses(tmp_path / "log")
    assert {n: loss.value for n, loss in log.steps.items()} == {1: 5, 2: 4, 3: 3, 4: 2}
    assert log.restarts == ((2, 2),)
    lines = ours(tmp_path / "a", {1: 5.0, 2: 4.0, 3: 9.0}).read_text()
    again = ours(tmp_path / "b", {2: 4.5}, 1).read_text()
    (tmp_path / "log").write_text(lines + again + '{"event": "step", "st')
    log = read_losses(tmp_path / "log")
    assert {n: loss.value for n, loss in log.steps.items()} == {1: 5, 2: 4.5}
    assert log.restarts == ((1, 2),)


def test_not_a_number(tmp_path: Path) -> None:
    one = read_losses(ours(tmp_path / "a", {1: 1.0, 2: float("nan"), 3: float("nan"), 4: 5.0}))
    other = read_losses(ours(tmp_path / "b", {1: 1.0, 2: float("nan"), 3: 7.0, 4: 9.0}))
    comparison = compare_losses(one, other, tolerance=1e9)
    assert (comparison.equal, comparison.first_difference.step, comparison.largest_difference.step) == (2, 3, 3)
    assert not comparison.holds


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none").write_text("nothing to see\n")
    with pytest.raises(UsageError, match="holds no losses"):
        read_losses(tmp_path / "none")
    with pytest.raises(UsageError, match="cannot be read"):
        read_losses(tmp_path / "missing")
    early, late = ours(tmp_path / "a", {1: 1.0}), ours(tmp_path / "b", {2: 1.0}, 1)
    status, text = verify(capsys, early, late)
    assert status == 1 and "no step is in both" in text
    assert main(["verify", str(tmp_path), "--loss", str(early), str(late)]) == 2
    assert main(["verify"]) == 2
    assert main(["verify", str(tmp_path), "--tolerance", "1"]) == 2
    for words in (["--tolerance", "-1"], ["--tolerance", "nan"], ["--data", "data.yaml"]):
        assert main(["verify", "--loss", "a", "b", *words]) == 2
        assert "cannot read" not in capsys.readouterr().err
