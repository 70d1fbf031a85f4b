"""`megaresume latest`: what is printed where, the exit status, and directories that megaresume saved into."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from megaresume.checkpoint.records.step_file import read_step_file
from megaresume.checkpoint.save.commit import begin_save
from megaresume.program import main
from tests.cli.conftest import SavedRun, megaresume, run  # noqa: F401  a fixture


def archive(path: Path, content: object) -> None:
    """As torch.save lays it out, without torch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = io.BytesIO()
    pickle.dump(content, data, protocol=2)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{path.stem}/data.pkl", data.getvalue())


def write_megatron(root: Path, number: int, *, complete: bool = True) -> Path:
    path = root / f"iter_{number:07d}"
    sizes = {f"{kind}_model_parallel_size": 1 for kind in ("tensor", "pipeline", "expert")}
    archive(path / "mp_rank_00" / "model_optim_rng.pt", {"args": SimpleNamespace(**sizes)})
    if complete:
        (root / "latest_checkpointed_iteration.txt").write_text(str(number))
    return path


def write_zero(root: Path, number: int, *, complete: bool = True, dp: int = 2) -> Path:
    path = root / f"global_step{number}"
    config = {"zero_optimization": {"stage": 2}}
    states = {"dp_world_size": dp, "mp_world_size": 1, "optimizer": None, "ds_config": config}
    archive(path / "mp_rank_00_model_states.pt", states)
    for rank in range(dp if complete else dp - 1):
        archive(path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", {})
    (root / "latest").write_text(path.name)
    return path


def write_verl(root: Path, number: int, *, complete: bool = True) -> Path:
    path = root / f"global_step_{number}"
    for kind in ("model", "optim", "extra_state"):
        archive(path / "actor" / f"{kind}_world_size_1_rank_0.pt", {})
    if complete:
        archive(path / "data.pt", {})
        (root / "latest_checkpointed_iteration.txt").write_text(str(number))
    return path


def write_hugging_face(root: Path, number: int, *, complete: bool = True) -> Path:
    path = root / f"checkpoint-{number}"
    path.mkdir(parents=True)
    header = b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"abcd")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        archive(path / name, {})
    if complete:
        (path / "trainer_state.json").write_text(json.dumps({"global_step": number}))
    return path


WRITERS = [write_megatron, write_zero, write_verl, write_hugging_face]


@pytest.mark.parametrize("write", WRITERS)
def test_one_path_on_standard_output(tmp_path: Path, write: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(write)
    path = write(tmp_path, 4)
    write(tmp_path, 10, complete=False)
    for words, expected in (([], str(path)), (["--tag"], path.name), (["--iteration"], "4")):
        assert main(["latest", str(tmp_path), *words]) == 0
        out, err = capsys.readouterr()
        assert out == expected + "\n"
        assert err.count("megaresume: not ") == 1
    assert main(["latest", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["path"], report["iteration"], report["by"]) == (str(path), 4, "files")
    assert [r["iteration"] for r in report["passed_over"]] == [10]


def test_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for root in (tmp_path, tmp_path / "nowhere"):
        assert main(["latest", str(root)]) == 1
        out, err = capsys.readouterr()
        assert out == "" and "there is no checkpoint" in err and "--allow-none" in err
        assert main(["latest", str(root), "--allow-none"]) == 0
        assert capsys.readouterr() == ("", "")
    write_hugging_face(tmp_path, 4, complete=False)
    for words in ([], ["--allow-none"]):  # never a silent fresh start
        assert main(["latest", str(tmp_path), *words]) == 1
        out, err = capsys.readouterr()
        assert out == "" and "none of the 1 checkpoints" in err and "next action" in err
    assert main(["latest", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["path"] is None
    assert main(["latest", str(tmp_path / "checkpoint-4" / "optimizer.pt")]) == 2
    assert main(["latest", str(tmp_path / "checkpoint-4")]) == 2
    assert "one checkpoint, not a directory" in capsys.readouterr().err


def test_the_manifest_decides(run: SavedRun, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    """Where megaresume saved: its records, although these weights are no archive at all."""
    assert main(["latest", str(run.save), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["tag"], report["iteration"], report["by"]) == ("global_step12", 12, "manifest")
    weights = run.save / "global_step12" / "mp_rank_00_model_states.pt"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert main(["latest", str(run.save), "--tag"]) == 0
    out, err = capsys.readouterr()
    assert out == "global_step8\n" and "global_step12: mp_rank_00_model_states.pt: has 83 bytes, had 84" in err
    # A save that a kill cut short, with files that look whole.
    record = read_step_file(run.save / "megaresume" / "step_0000008.json")
    begin_save(run.save, tag="global_step16", iteration=16, state=record.state)
    write_zero(run.save, 16)
    assert main(["latest", str(run.save), "--tag"]) == 0
    out, err = capsys.readouterr()
    assert out == "global_step8\n" and "did not end" in err
    # Nothing is left by the records; a checkpoint from before megaresume was adopted is.
    for number in (4, 8, 12):
        shutil.rmtree(run.save / f"global_step{number}")
    write_zero(run.save, 2)
    assert main(["latest", str(run.save), "--tag"]) == 0
    assert capsys.readouterr().out == "global_step2\n"


@pytest.mark.process
def test_as_a_program(tmp_path: Path) -> None:
    path = write_zero(tmp_path / "a b", 4)
    done = megaresume("latest", tmp_path / "a b")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{path}\n", "")
    code = "import sys; from megaresume.program import main; main(sys.argv[1:]); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "latest", tmp_path / "a b"], capture_output=True, text=True, check=True
    )
    assert not {"torch", "numpy", "deepspeed", "transformers"}.intersection(done.stdout.split())


@pytest.mark.process
def test_names_that_are_no_text(tmp_path: Path) -> None:
    root = tmp_path / os.fsdecode(b"\xff dir")
    path = write_zero(root, 4)
    command = [sys.executable, "-m", "megaresume", "latest", root]
    env = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}  # as in every locale but C
    done = subprocess.run(command, env=env, capture_output=True, check=True)
    assert done.stdout == os.fsencode(path) + b"\n"


def test_an_error_names_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(30):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert main(["latest", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert "none of the 30" in err and "checkpoint-29:" in err and "checkpoint-5:" not in err and "and 20 more" in err


def test_a_header_nested_without_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_hugging_face(tmp_path, 4)
    path = write_hugging_face(tmp_path, 6)
    deep = b"[" * 200_000
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(deep)) + deep)
    assert main(["latest", str(tmp_path), "--tag"]) == 0
    out, err = capsys.readouterr()
    assert out == "checkpoint-4\n" and "has a header that cannot be read" in err
