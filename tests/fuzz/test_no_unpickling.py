"""Looking at a checkpoint never unpickles anything: every file of weights here would run a command if one did."""

from __future__ import annotations

import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from megaresume.batches.open import open_stream
from megaresume.checkpoint.save.commit import begin_save, commit_save, write_data_config
from megaresume.checkpoint.starts import record_start
from tests.checkpoint.durability import make_durable

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]

#: Runs the command line in a process that a class looked up by any unpickler, of C, Python, torch or numpy, ends.
CHILD = """
import os, sys

def of_numba(frame):
    # Its cache of compiled loops, which no checkpoint brings.
    while frame is not None:
        if frame.f_code.co_filename.endswith("numba/core/caching.py"):
            return True
        frame = frame.f_back
    return False

def hook(event, args):
    if event == "pickle.find_class" and not of_numba(sys._getframe(1)):
        os.write(2, f"unpickles {args}".encode())
        os._exit(99)

sys.addaudithook(hook)
if sys.argv[1] == "unpickle":
    import pickle
    pickle.load(open(sys.argv[2], "rb"))
from megaresume.program import main
sys.exit(main(sys.argv[1:]))
"""


class Trap:
    """Pickled, it is a call of `os.system`."""

    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> tuple[object, ...]:
        import os

        return (os.system, (f"touch {self.sprung}",))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A real run of two checkpoints full of traps, in three layouts; and the file that a trap would make."""
    directory = tmp_path_factory.mktemp("traps")
    sprung = directory / "sprung"
    trap = pickle.dumps(Trap(sprung))
    prefix = directory / "web"
    lengths = np.full(50, 20, "<i4")
    header = b"MMIDIDX\0\0" + np.array([1], "<i8").tobytes() + b"\x04" + np.array([50, 51], "<i8").tobytes()
    Path(f"{prefix}.bin").write_bytes(np.arange(1000, dtype="<i4").tobytes())
    Path(f"{prefix}.idx").write_bytes(
        header + lengths.tobytes() + (np.arange(50) * 80).astype("<i8").tobytes() + np.arange(51, dtype="<i8").tobytes()
    )
    stream = open_stream({"seed": 1, "seq_length": 16, "sources": {"web": {"path": str(prefix)}}})
    save = directory / "save"
    record_start(save, iteration=0, state=stream.state_at(0))
    for iteration in (1, 2):
        pending = begin_save(
            save,
            tag=f"global_step{iteration}",
            iteration=iteration,
            state=stream.state_at(8 * iteration, batches=((0, 8),)),
        )
        pending.tag_dir.mkdir()
        for name in (
            "mp_rank_00_model_states.pt",
            ".metadata",
            "__0_0.distcp",
            "common.pt",
            "extra.npy",
            "web.idx.npy",
        ):
            (pending.tag_dir / name).write_bytes(trap)
        with zipfile.ZipFile(pending.tag_dir / "zero_pp_rank_0_mp_rank_00_optim_states.pt", "w") as archive:
            archive.writestr("archive/data.pkl", trap)
        make_durable(save, commit_save(pending).manifest)
        hugging_face = directory / f"hf/checkpoint-{iteration}"
        hugging_face.mkdir(parents=True)
        for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin", "scheduler.pt", "rng_state.pth"):
            (hugging_face / name).write_bytes(trap)
        (hugging_face / "trainer_state.json").write_text(f'{{"global_step": {iteration}}}')
    write_data_config(save, stream.origin)
    for name in ("loader.pkl", "order.pt", "step_0000002.loader.0.pt"):
        (save / "megaresume" / name).write_bytes(trap)
    megatron = directory / "megatron/iter_0000002/mp_rank_00"
    megatron.mkdir(parents=True)
    (megatron / "model_optim_rng.pt").write_bytes(trap)
    (directory / "megatron/latest_checkpointed_iteration.txt").write_text("2")
    return directory, sprung


def _child(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def test_the_traps_work(run: tuple[Path, Path]) -> None:
    """Who unpickles one is seen."""
    directory, _ = run
    done = _child("unpickle", directory / "save/global_step2/mp_rank_00_model_states.pt")
    assert done.returncode == 99 and "unpickles" in done.stderr


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("inspect save --checksums", 0),
        ("inspect save/global_step2 --json", 0),
        ("inspect megatron", None),
        ("latest save", 0),
        ("latest hf", None),
        ("latest megatron", None),
        ("trace save --step 2", 0),
        ("plan save --mtbf 6h", None),
        ("verify save", 0),
        ("stream save/megaresume/data.yaml", 0),
        ("doctor save", None),
        ("doctor hf", None),
        ("doctor megatron", None),
        ("report save", None),
    ],
)
def test_nothing_is_unpickled(run: tuple[Path, Path], words: str, status: int | None) -> None:
    """Each command gets as far as it can: where the directory is whole, to its end."""
    directory, sprung = run
    command, where, *more = words.split()
    done = _child(command, directory / where, *more)
    assert done.returncode in ((0, 1, 2) if status is None else (status,)), done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "unrecognized" not in done.stderr and not sprung.exists(), done.stderr
