"""A checkpoint root with real files, saved by the real protocol."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megaresume.checkpoint.save.commit import Commit, begin_save, commit_save
from megaresume.checkpoint.save.retention import KEEP_ALL, Retention, make_room
from megaresume.checkpoint.system import Topology
from megaresume.stream.state import Bin, Fingerprint, Segment, SourceCursor, StageRecord, StreamState
from megaresume.stream.state_text import Era
from tests.checkpoint.durability import make_durable

MODEL = "mp_rank_00_model_states.pt"
OPTIM = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
CONFIG = {"seed": 1, "seq_length": 16, "sources": {"web": {"weight": 3}, "code": {"weight": 2}}}


def make_state(samples: int, *, salt: int = 0) -> StreamState:
    """A small state; another salt gives another digest of the same position."""
    cursor = SourceCursor(
        position=samples * 3,
        epoch=0,
        documents=samples * 3,
        tokens=samples * 16,
        skipped=0,
        drawn_in_stage=samples * 16,
        exhausted=False,
        eras=(Era(first=0, epoch=0, documents=10_000, piece=64, pieces=10_000),),
    )
    names = ("web", "code")
    return StreamState(
        config=CONFIG,
        fingerprints={name: Fingerprint(documents=10_000, tokens=10**6, lengths="a" * 32) for name in names},
        samples=samples,
        documents=samples * 6,
        tokens=samples * 16,
        sources=dict.fromkeys(names, cursor),
        bins=(Bin(opened_at=1, segments=(Segment(source=0, position=7, offset=0, length=5),)),),
        pending=(),
        stages=(StageRecord(first=0, name="first", config=CONFIG),),
        batches=((0, 8),),
        overrides=(),
        digest=f"{samples * 1000 + salt:016x}",
    )


def write_model(tag_dir: Path, state: StreamState) -> None:
    """Model files that tell which state they belong to; their sizes do not depend on it."""
    tag_dir.mkdir(parents=True, exist_ok=True)
    for name in (MODEL, OPTIM):
        (tag_dir / name).write_bytes(state.digest.encode() * 64)


def save_checkpoint(root: Path, iteration: int, *, tag: str | None = None, salt: int = 0, **kwargs: object) -> Commit:
    """Save as a training program would: marker, model files, commit."""
    state = make_state(iteration * 8, salt=salt)
    checksums = bool(kwargs.pop("checksums", False))
    beside = kwargs.pop("beside", ())
    retention = kwargs.pop("retention", KEEP_ALL)
    assert isinstance(retention, Retention)
    make_room(root, iteration, tag or f"global_step{iteration}")
    pending = begin_save(
        root,
        tag=tag or f"global_step{iteration}",
        iteration=iteration,
        state=state,
        topology=Topology(dp=2, num_workers=2, global_batch_size=8),
        **kwargs,  # type: ignore[arg-type]
    )
    write_model(pending.tag_dir, state)
    commit = commit_save(pending, expected_files=[MODEL, OPTIM], beside=beside)
    make_durable(root, commit.manifest, checksums=checksums, retention=retention)
    return commit


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In memory where the machine has it: thousands of fsyncs, which these tests do not need, cost minutes on disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path_factory.mktemp("checkpoint")
        return
    with tempfile.TemporaryDirectory(prefix="megaresume-test-", dir=memory) as directory:
        yield Path(directory)


@pytest.fixture
def save() -> Callable[..., Commit]:
    return save_checkpoint


@pytest.fixture
def state() -> Callable[..., StreamState]:
    return make_state


@pytest.fixture
def model() -> Callable[[Path, StreamState], None]:
    return write_model


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three checkpoints: 10, 20, 30; the pointers name 30."""
    directory = tmp_path / "save"
    for iteration in (10, 20, 30):
        save_checkpoint(directory, iteration, checksums=True)
    assert os.listdir(directory / "megaresume")
    return directory
