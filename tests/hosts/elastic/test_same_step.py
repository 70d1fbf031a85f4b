"""A step that four ranks have half saved, and two ranks save again: nothing of the four gets into it."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.load.choose import choose
from megaresume.program import main
from tests.release import release

pytestmark = pytest.mark.process

HERE = Path(__file__).parent
CASES = ["zero1", "zero3"]
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(launch: Any, data_yaml: Path) -> Run:
    def results(num_processes: int, root: Path, mode: str) -> dict[str, Any]:
        status, output = launch(str(HERE / "same_step_toy.py"), data_yaml, root, mode, num_processes=num_processes)
        assert status == (-signal.SIGKILL if mode == "killed" else 0), output[-3000:]
        lines = [line.removeprefix("RESULT ") for line in output.splitlines() if line.startswith("RESULT ")]
        return {name: json.loads(value)[0] for name, value in (line.split(" ", 1) for line in lines)}

    return results


@pytest.fixture(scope="module")
def killed(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("same_step")
    run(4, root, "killed")
    assert len(list((root / "zero1" / "global_step8").glob("*_optim_states.pt"))) == 4
    return root


@pytest.fixture(scope="module")
def fewer(run: Run, killed: Path) -> dict[str, Any]:
    return run(2, killed, "fewer")


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=release("`[4]`: to four ranks", "the same, `[1]`"))])
def test_other_ranks_resume_exactly(run: Run, killed: Path, fewer: dict[str, Any], tmp_path: Path, ranks: int) -> None:
    root = shutil.copytree(killed, tmp_path / "save")
    found = run(ranks, root, "on")
    for case in CASES:
        assert len(list((root / case / "global_step8").glob("*_optim_states.pt"))) == 2
        assert f"dp 2->{ranks}" in found[case]["line"] and "repeated 0 skipped 0" in found[case]["line"]
        assert found[case]["losses"] == pytest.approx(fewer[case]["losses"], rel=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_files_of_other_ranks_are_refused(
    fewer: dict[str, Any], killed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    root = Path(shutil.copytree(killed / case, tmp_path / "save"))
    tag = root / "global_step8"
    (path,) = tag.glob("*zero_pp_rank_1_*optim_states.pt")
    shutil.copy(path, path.with_name(path.name.replace("rank_1_", "rank_2_")))
    choice = choose(root)
    assert choice is not None and choice.tag == "global_step4"
    assert "rank_2_" in choice.rejected[0].reason and "the manifest does not name it" in choice.rejected[0].reason
    assert main(["convert", str(root), "--tag", "global_step8"]) == 1
    assert "the manifest does not name it" in capsys.readouterr().err
