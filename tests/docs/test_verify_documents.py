"""docs/verify.md and the validation sets of docs/stream.md: commands, data config and code, as they stand there."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megaresume.batches.loader import StreamLoader
from megaresume.batches.open import open_stream
from megaresume.checkpoint.records.rank_log import RankLog, noted
from megaresume.checkpoint.system import Topology
from megaresume.data.prepare.corpus import PrepareOptions, prepare
from megaresume.program import main
from megaresume.stream.batches import BatchSchedule
from tests.cli import conftest
from tests.cli.conftest import SavedRun
from tests.cli.conftest import run as run
from tests.docs.pages import section


@pytest.fixture(autouse=True)
def layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "Topology", functools.partial(Topology, micro_batch_size=2))


def logs(run: SavedRun, directory: Path) -> None:
    """What two ranks were handed in twelve steps, and two logs of losses."""
    for rank in range(2):
        log = RankLog(directory / "samples", rank=rank, launch=1)
        log.start(step=0, samples=0, dp_rank=rank, dp=2, micro_batch_size=2, pad_id=0, digest="0" * 16)
        stream = open_stream(run.data)
        loader = StreamLoader(
            stream, BatchSchedule.constant(8), micro_batch_size=2, dp_rank=rank, dp_size=2, stop=96, prefetch=0
        )
        for number, batch in enumerate(loader, start=1):
            log.add_noted(noted(batch))
            if number % 2 == 0:
                log.end_step(number // 2)
        log.close()
    for name, loss in (("run.log", "5.000000E+00"), ("twin.log", "5.000000E+00")):
        (directory / name).write_text(f" iteration        1/      12 | lm loss: {loss} | grad norm: 1.0 |\n")


def commands(title: str) -> list[str]:
    return re.findall(r"^    megaresume (.*)$", section("verify.md", title), flags=re.MULTILINE)


@pytest.mark.parametrize(("title", "number"), [("Prove it", 8), ("A report of a run", 3)])
def test_the_commands(
    run: SavedRun,
    tmp_path: Path,
    title: str,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs(run, tmp_path)
    (tmp_path / "checkpoints").symlink_to(run.save)
    monkeypatch.chdir(tmp_path)
    assert len(commands(title)) == number
    for command in commands(title):
        assert main(command.split()) == 0, (command, capsys.readouterr())
    if title == "A report of a run":
        assert "<svg" in (run.save / "report.html").read_text()
        return
    # What it shows of a difference.
    path = tmp_path / "samples" / "rank_00001.jsonl"
    from megaresume.checkpoint.records.sealed import seal, unseal

    lines = [unseal(line) for line in path.read_bytes().splitlines()]
    changed = [line | ({"order": "0" * 16} if line["step"] == 7 else {}) for line in lines]
    path.write_bytes(b"".join(seal({k: v for k, v in line.items() if k != "checksum"}) for line in changed))
    capsys.readouterr()
    assert main(["verify", "checkpoints/", "--log-samples", "samples/"]) == 1
    output = capsys.readouterr().out
    for line in re.findall(r"^    (first difference.*|  order.*)$", section("verify.md", title), flags=re.MULTILINE):
        assert line in output.splitlines(), line


@pytest.mark.process
def test_the_validation_sets(tmp_path: Path) -> None:
    text = section("stream.md", "Validation that stays put")
    (config,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "data.yaml").write_text(config)
    (tmp_path / "corpora").mkdir()
    for name in ("web", "code", "wiki"):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(f"{name} {i} " + "x" * (i * 7 % 90) for i in range(120)))
        options = PrepareOptions(text_unit="paragraph", workers=1)
        prepare([tmp_path / f"{name}.txt"], tmp_path / "corpora" / name, options)
    code += "\nassert list(sets) == ['held_out', 'test', 'code', 'wiki'] and sets['wiki'].digest_at(8)\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
