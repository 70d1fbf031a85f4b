"""The state in Megatron's checkpoints: every format of several megatron-cores; what a load restores and refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaresume.batches.open import open_stream
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.records.envelope import DataState, Envelope
from megaresume.checkpoint.records.manifest import FileEntry
from megaresume.checkpoint.save.commit import begin_save, commit_save
from megaresume.hosts.megatron import checkpointing
from megaresume.hosts.megatron.arguments import Settings
from megaresume.hosts.megatron.host import KEY, MegatronHost
from megaresume.hosts.megatron.project import Project
from megaresume.stream.errors import CheckpointError, StateError
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream
from tests.release import release

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

FORMATS = Path(__file__).with_name("formats.py")


@pytest.fixture(scope="session")
def stream(data_yaml: Path) -> Stream:
    return open_stream(data_yaml)


def text_of(state: StreamState, iteration: int) -> str:
    return Envelope(state=state, iteration=iteration, framework="megatron-lm 0.16.1").to_text()


# Formats


def formats(python: str, directory: Path, text: str, core: Path | None) -> dict[str, Any]:
    path = [str(core)] if core is not None else []
    done = subprocess.run(
        [python, str(FORMATS), str(directory)],
        env=os.environ | {"STATE": text, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = [line.removeprefix("FOUND ") for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert done.returncode == 0 and lines, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(lines[0])
    return found


RELEASE = release(
    "older and newer versions, each a download",
    "the same, `[installed]`",
)


@pytest.mark.parametrize(
    "version", ["installed", *(pytest.param(v, marks=RELEASE) for v in ("0.12.3", "0.14.0", "0.19.0"))]
)
def test_formats(version: str, core_wheel: Callable[[str], Path], stream: Stream, tmp_path: Path) -> None:
    python, core = sys.executable, None
    if version == "0.19.0":
        python = os.environ.get("MEGARESUME_TEST_PYTHON312") or shutil.which("python3.12") or ""
        ask = [python, "-c", "import torch, triton"]
        if not python or subprocess.run(ask, capture_output=True).returncode:
            pytest.skip("megatron-core 0.19 needs Python 3.12 with torch and triton: MEGARESUME_TEST_PYTHON312=PATH")
    if version != "installed":
        core = core_wheel(version)
    found = formats(python, tmp_path, text_of(stream.state_at(320), 40), core)
    if core is not None:
        assert found["version"].startswith(version.rpartition(".")[0])
    assert all(value for name, value in found.items() if name not in ("version", "files")), found
    assert ("common.pt" in found["files"]) == (version != "0.19.0")


# What a load restores


class Loading:
    """One load of Megatron's, from a namespace that a checkpoint would have held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.root = root
        self.args = Namespace(
            load=str(root), save=str(root), consumed_train_samples=0, global_batch_size=8, micro_batch_size=2
        )
        self.mode: Any = "stream"
        self.host: MegatronHost | None = None
        monkeypatch.setattr(checkpointing, "megatron_host", self.current)
        monkeypatch.setattr(checkpointing, "latest_host", self.current)

    def current(self) -> MegatronHost:
        if self.host is None:
            project = Project(kind="megatron-lm", root=Path(), version="0.16.1", modules={})
            self.host = MegatronHost(project, self.args, Settings(mode=self.mode))
        return self.host

    def __call__(self, iteration: int, saved: Namespace | None, *, load_arg: str = "load") -> MegatronHost:
        (self.root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        check = checkpointing.around_check_checkpoint_args(lambda checkpoint_args: None)

        def load_checkpoint(model: object, load_arg: str = "load") -> tuple[int, int]:
            if saved is not None:
                check(saved)
                self.args.consumed_train_samples = saved.consumed_train_samples
            return iteration, 0

        assert checkpointing.around_load_checkpoint(load_checkpoint)([], load_arg=load_arg) == (iteration, 0)
        return self.current()


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Loading:
    return Loading(monkeypatch, tmp_path)


def saved_args(stream: Stream, samples: int = 80, iteration: int = 10, **more: Any) -> Namespace:
    state = text_of(stream.state_at(samples, batches=((0, 8),)), iteration)
    return Namespace(**{"consumed_train_samples": samples, "global_batch_size": 8, KEY: state} | more)


def test_load(loading: Loading, stream: Stream) -> None:
    current = loading(10, saved_args(stream))
    assert current.loaded is not None and current.session.loaded is not None
    assert (current.loaded.iteration, current.loaded.samples, current.loaded.kind) == (10, 80, "stream")
    assert current.session.loaded.choice.iteration == 10
    # what was seen is forgotten at the next load
    assert loading(10, Namespace(consumed_train_samples=80, global_batch_size=8)).loaded is None
    with pytest.raises(CheckpointError, match="the checkpoint has no arguments"):
        loading(10, None)


def test_a_teacher_is_none_of_ours(loading: Loading, stream: Stream) -> None:
    loading(10, saved_args(stream))
    after = loading(20, saved_args(stream, 160, 20), load_arg="export_kd_teacher_load")
    assert after.loaded is not None and after.loaded.iteration == 10


def test_weights_to_begin_with(loading: Loading, stream: Stream, capsys: pytest.CaptureFixture[str]) -> None:
    """A released checkpoint: iteration 0, although its arguments count 80 samples."""
    current = loading(0, saved_args(stream))
    assert current.loaded is None
    assert loading.args.consumed_train_samples == 0
    assert "begins at sample 0" in capsys.readouterr().out
    loading.args.finetune = True
    assert loading(0, None).loaded is None


@pytest.mark.parametrize("code", [None, 0, 3])
def test_megatron_gives_up_with_status_0(loading: Loading, code: int | None) -> None:
    (loading.root / "latest_checkpointed_iteration.txt").write_text("10")

    def load_checkpoint(model: object) -> tuple[int, int]:
        raise SystemExit(code)

    expected, words = (SystemExit, "3") if code else (CheckpointError, "would have ended with status 0")
    with pytest.raises(expected, match=words):
        checkpointing.around_load_checkpoint(load_checkpoint)([])


def test_arguments_did_not_come_back(loading: Loading) -> None:
    with pytest.raises(CheckpointError, match="the checkpoint has no arguments"):
        loading(10, None)


def test_other_step(loading: Loading, stream: Stream) -> None:
    with pytest.raises(StateError, match="different steps"):
        loading(11, saved_args(stream))
    with pytest.raises(StateError, match="different steps"):
        loading(10, saved_args(stream, consumed_train_samples=88))
    loading.args.override_ckpt_iteration = 11
    current = loading(11, saved_args(stream, consumed_train_samples=88))
    assert current.loaded is not None and current.loaded.samples == 80


def commit(root: Path, state: StreamState, iteration: int = 10) -> None:
    tag = f"iter_{iteration:07d}"
    pending = begin_save(root, tag=tag, iteration=iteration, state=state, latest=False)
    (root / tag).mkdir(exist_ok=True)
    (root / tag / "common.pt").write_bytes(b"weights")
    commit_save(pending)


def test_what_lies_beside(loading: Loading, stream: Stream) -> None:
    commit(loading.root, stream.state_at(80, batches=((0, 8),)))
    assert loading(10, saved_args(stream)).loaded is not None
    commit(loading.root, stream.state_at(80, batches=((0, 4), (40, 8))))
    with pytest.raises(StateError, match="not the one beside it"):
        loading(10, saved_args(stream))
    # A non-persistent checkpoint of the same step has no records. A marker: the step was being saved again.
    loading.args.non_persistent_ckpt_type = "global"
    loading(10, saved_args(stream))
    loading.args.non_persistent_ckpt_type = None
    begin_save(loading.root, tag="iter_0000010", iteration=10, state=stream.state_at(80))
    loading(10, saved_args(stream))


def test_damaged_state(loading: Loading, stream: Stream) -> None:
    args = saved_args(stream)
    setattr(args, KEY, getattr(args, KEY)[:-40])
    with pytest.raises(StateError, match="unreadable"):
        loading(10, args)


def test_off(loading: Loading, stream: Stream) -> None:
    loading.mode = "off"
    assert loading(10, saved_args(stream)).loaded is None


# What a save writes


class Fixed:
    """An order that stands still."""

    origin = None
    changed = ()

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def prepare(self) -> None:
        pass

    def read_back(self, state: DataState) -> None:
        pass

    def snapshot(self, samples: int) -> DataState:
        return self.stream.state_at(samples, batches=((0, 8),))

    def write_files(self, save_dir: Path, iteration: int, tag: str) -> tuple[FileEntry, ...]:
        return ()

    def restore(self, state: DataState, choice: Choice) -> None:
        raise AssertionError

    def describe(self) -> list[str]:
        return []


def save_with(loading: Loading, iteration: int, **given: Any) -> str | None:
    """What was on ``args`` while Megatron saved."""
    seen: list[str | None] = []

    def save_checkpoint(
        iteration: int, model: object, non_persistent_ckpt: bool = False, release: bool = False
    ) -> None:
        seen.append(getattr(loading.args, KEY, None))
        directory = loading.root / ("non_persistent" if non_persistent_ckpt else "") / f"iter_{iteration:07d}"
        directory.mkdir(parents=True)
        (directory / "common.pt").write_bytes(b"weights")

    checkpointing.around_save_checkpoint(save_checkpoint)(iteration, [], **given)
    return seen[0]


def records(loading: Loading) -> list[str]:
    return sorted(path.name for path in (loading.root / "megaresume").glob("step_*"))


def test_save(loading: Loading, stream: Stream) -> None:
    current = loading.current()
    assert save_with(loading, 1) is None  # before the data is built
    assert records(loading) == []
    current.order = Fixed(stream)
    current.session.roots.mark_as_own(loading.root)
    current.proof.is_built = True
    loading.args.consumed_train_samples = 80
    text = save_with(loading, 10)
    assert text is not None
    assert Envelope.read(text).state == stream.state_at(80, batches=((0, 8),))
    assert records(loading) == ["step_0000010.json", "step_0000010.manifest.json"]
    assert not [path for path in (loading.root / "iter_0000010").iterdir() if path.name != "common.pt"]
    loading.args.consumed_train_samples = 96
    text = save_with(loading, 12, non_persistent_ckpt=True)
    assert text is not None and Envelope.read(text).samples == 96
    assert records(loading) == ["step_0000010.json", "step_0000010.manifest.json"]


def test_a_conversion_hands_the_state_on(loading: Loading, stream: Stream) -> None:
    args = saved_args(stream)
    loading(10, args)
    assert save_with(loading, 10) == getattr(args, KEY)
    assert records(loading) == []  # the next start writes them
    loading.args.consumed_train_samples = 0
    assert save_with(loading, 11) is None
