from __future__ import annotations

import importlib.util
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from megaresume.batches.open import open_stream
from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.records.sealed import seal
from megaresume.checkpoint.save.commit import begin_save
from megaresume.checkpoint.starts import record_start
from megaresume.checkpoint.system import Topology
from megaresume.program import main
from megaresume.runs.inspect import source_table


def _helpers() -> ModuleType:
    path = Path(__file__).parents[1] / "checkpoint" / "conftest.py"
    spec = importlib.util.spec_from_file_location("checkpoint_helpers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


helpers = _helpers()
MODEL = helpers.MODEL


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "save"
    for iteration in (10, 20, 30):
        helpers.save_checkpoint(directory, iteration, checksums=True)
    return directory


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def call(*args: object) -> tuple[int, str]:
        status = main(["inspect", *map(str, args)])
        return status, capsys.readouterr().out

    return call


@pytest.fixture
def report(inspect: Callable[..., tuple[int, str]]) -> Callable[..., tuple[int, Any]]:
    def call(*args: object) -> tuple[int, Any]:
        status, out = inspect(*args, "--json")
        return status, json.loads(out)

    return call


Inspect = Callable[..., tuple[int, str]]
Report = Callable[..., tuple[int, Any]]


def test_everything_well(root: Path, inspect: Inspect) -> None:
    status, out = inspect(root)
    assert status == 0
    assert "resumes from global_step30, at sample 240" in out
    assert helpers.make_state(240).digest in out
    assert "dp 2 workers 2 gbs 8" in out
    assert "latest_checkpointed_iteration.txt             30  global_step30, complete" in out
    assert "ledger, the last 6 of 6 lines" in out
    for line in ("web          3      0       720  10,000   3,840  50.0%", ">  global_step30  complete"):
        assert line in out
    assert "notes" not in out


def test_json(root: Path, report: Report) -> None:
    status, data = report(root)
    assert status == 0
    assert data["resumable"] is True
    choice = choose(root)
    assert choice is not None
    assert data["choice"] == choice.to_dict() | {"rejected": []}
    assert data["state"]["state"]["content"] == helpers.make_state(240).to_dict()
    assert [c["status"] for c in data["checkpoints"]] == ["complete"] * 3
    assert [c["bytes"] for c in data["checkpoints"]] == [2048] * 3
    assert [e["kind"] for e in data["ledger"]["entries"]] == ["checkpoint", "durable"] * 3
    assert [p["tag"] for p in data["pointers"]] == ["global_step30"] * 2
    assert (data["error"], data["notes"], data["leftovers"]) == (None, [], [])


def test_damage_is_named_and_the_rest_is_printed(root: Path, inspect: Inspect) -> None:
    record_start(root, iteration=30, state=helpers.make_state(240), choice=choose(root), topology=Topology(dp=1))
    os.truncate(root / "global_step30" / MODEL, 5)
    begin_save(root, tag="global_step40", iteration=40, state=helpers.make_state(320))
    helpers.write_model(root / "global_step40", helpers.make_state(320))
    (root / "latest").write_text("global_step40")
    with open(root / "megaresume" / "ledger.jsonl", "ab") as file:
        file.write(b'{"format": "megaresume.led')
    (root / "megaresume" / ".step_0000040.json.megaresume-1-00000000.tmp").write_bytes(b"half")
    status, out = inspect(root)
    assert status == 0
    assert "resumes from global_step20, at sample 160" in out
    assert f"      {MODEL}: has 5 bytes, had 1024 when it was saved" in out
    assert "global_step40, incomplete" in out
    assert "did not end" in out
    assert "ledger line 8 is torn after 26 bytes" in out
    assert "temporary files of killed writers, harmless: megaresume/.step_0000040.json" in out


def test_not_resumable(root: Path, inspect: Inspect, report: Report) -> None:
    for iteration in (10, 20, 30):
        (root / f"global_step{iteration}" / MODEL).unlink()
    status, out = inspect(root)
    assert status == 1
    assert "NOT RESUMABLE: none of the 3 checkpoints" in out
    assert out.count("is missing, had 1024 bytes") >= 3
    assert "data state of global_step30" in out
    status, data = report(root)
    assert (status, data["resumable"], data["choice"]) == (1, False, None)
    assert data["error"].startswith("none of the 3 checkpoints")


def test_nothing_there(tmp_path: Path, inspect: Inspect) -> None:
    status, out = inspect(tmp_path)
    assert status == 1
    assert "NOT RESUMABLE: there is no checkpoint" in out


def test_without_megaresume(tmp_path: Path, inspect: Inspect) -> None:
    (tmp_path / "iter_0000100").mkdir()
    (tmp_path / "iter_0000100" / "model_optim_rng.pt").write_bytes(b"weights")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    status, out = inspect(tmp_path)
    assert status == 1
    assert "NOT RESUMABLE: iter_0000100 has no data state (written without megaresume)" in out
    assert "iter_0000100, unmanaged" in out


def test_weights_are_those_of_the_stage() -> None:
    class Texts:
        def __len__(self) -> int:
            return 200

        def length(self, i: int) -> int:
            return 10 + i % 2

        def get(self, i: int) -> np.ndarray:
            return np.zeros(self.length(i), int)

    data = {
        "seed": 1,
        "seq_length": 64,
        "packing": "best_fit",
        "sources": {"web": {"weight": 7}, "code": {"weight": 3}},
        "stages": [{"from_samples": 8, "weights": {"web": 1, "code": 4}}],
    }
    stream = open_stream(data, objects={"web": Texts(), "code": Texts()})
    shown = [re.findall(r"^  (\w+) +(\d+) ", source_table(stream.state_at(samples)), re.M) for samples in (4, 16)]
    assert shown == [[("web", "7"), ("code", "3")], [("web", "1"), ("code", "4")]]


def test_a_tag_directory(root: Path, inspect: Inspect, report: Report) -> None:
    (root / "global_step20" / MODEL).unlink()
    status, out = inspect(root / "global_step10")
    assert status == 0
    assert "resumes from global_step10, at sample 80" in out
    assert "global_step20  " not in out.split("ledger")[0]
    status, data = report(root / "global_step20")
    assert status == 1
    assert [c["tag"] for c in data["checkpoints"]] == ["global_step20"]


def test_checksums(root: Path, inspect: Inspect, report: Report) -> None:
    data = bytearray((root / "global_step30" / MODEL).read_bytes())
    data[100] ^= 1
    (root / "global_step30" / MODEL).write_bytes(data)
    assert "resumes from global_step30" in inspect(root)[1]
    status, out = inspect(root, "--checksums")
    assert status == 0
    assert "resumes from global_step20" in out
    assert "checksum is" in out
    helpers.save_checkpoint(root, 40, checksums=False)
    assert (
        "saved without checksums, so that only sizes could be compared: global_step40"
        in inspect(root, "--checksums")[1]
    )


def test_a_newer_version_is_said_for_each(root: Path, inspect: Inspect) -> None:
    path = root / "megaresume" / "step_0000030.json"
    fields = json.loads(path.read_bytes())
    del fields["checksum"]
    path.write_bytes(seal(fields | {"version": 99}))
    status, out = inspect(root)
    assert status == 1
    assert "NOT RESUMABLE: the data state was written by a newer megaresume" in out
    assert "global_step30  newer" in out
    assert "global_step20  complete" in out


def test_an_unreadable_ledger_hides_nothing_else(root: Path, inspect: Inspect) -> None:
    (root / "megaresume" / "ledger.jsonl").unlink()
    (root / "megaresume" / "ledger.jsonl").mkdir()
    status, out = inspect(root)
    assert status == 1
    assert "the ledger cannot be read" in out
    assert "global_step30  complete" in out
    assert "data state of global_step30" in out


def test_pruned_checkpoints_are_counted(root: Path, inspect: Inspect) -> None:
    shutil.rmtree(root / "global_step10")
    status, out = inspect(root)
    assert status == 0
    assert "1 more were pruned: their data states are kept" in out


def test_last(root: Path, inspect: Inspect) -> None:
    status, out = inspect(root, "--last", 1)
    assert status == 0
    assert "ledger, the last 1 of 6 lines" in out
    assert "... and 2 older (--last 3 shows all)" in out
    (root / "global_step30" / MODEL).unlink()
    (root / "global_step20" / MODEL).unlink()
    status, out = inspect(root, "--last", 1)
    assert status == 0
    assert ">  global_step10  complete" in out  # what a start takes is always shown
    assert "... and 1 older" in out


@pytest.mark.parametrize("args", [["{}/missing"], ["{}/latest"]])
def test_bad_usage(root: Path, args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *(arg.format(root) for arg in args)]) == 2
    assert capsys.readouterr().err.startswith("megaresume: error: ")


def test_at_least_one_line_is_shown(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["inspect", str(root), "--last", "0"])
    assert "--last: must be at least 1, not 0" in capsys.readouterr().err


class Trap:
    """Unpickling it would leave a file behind."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def test_nothing_is_unpickled(root: Path, tmp_path: Path, inspect: Inspect) -> None:
    trap = pickle.dumps(Trap(str(tmp_path / "sprung")))
    for path in [*root.glob("global_step*/*"), *root.glob("megaresume/*"), root / "latest"]:
        path.write_bytes(trap)
    inspect(root, "--checksums")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.process
def test_nothing_heavy_is_imported(root: Path) -> None:
    helpers.save_checkpoint(root, 40)
    command = [sys.executable, "-X", "importtime", "-m", "megaresume", "inspect", str(root)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.split("|")[-1].strip().split(".")[0] for line in result.stderr.splitlines()}
    assert "xxhash" in imported
    assert not imported & {"numpy", "numba", "torch", "deepspeed", "megatron", "yaml", "tqdm", "concurrent"}
