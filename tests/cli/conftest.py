"""A small run on disk: two corpora, a data config, three committed checkpoints without any training."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from megaresume.batches.open import open_stream
from megaresume.checkpoint.save.commit import begin_save, commit_save, write_data_config
from megaresume.checkpoint.starts import record_start
from megaresume.checkpoint.system import Topology
from megaresume.data.prepare.corpus import PrepareOptions, prepare
from megaresume.program import main


@dataclass(frozen=True)
class SavedRun:
    """Where everything lies."""

    data: Path
    save: Path
    corpora: Path


def megaresume(*words: object) -> subprocess.CompletedProcess[str]:
    """The program as a user starts it, but in this process: seconds of imports less."""
    command = [*map(str, words)]
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = main(command)
        except SystemExit as end:  # argparse
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
    texts = (file.buffer.getvalue().decode("utf-8", "surrogateescape") for file in (out, err))
    return subprocess.CompletedProcess(command, status, *texts)


def megaresume_process(*words: object) -> subprocess.CompletedProcess[str]:
    """The same, in a process of its own."""
    command = [sys.executable, "-m", "megaresume", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=1500)


@pytest.fixture
def run(tmp_path: Path) -> SavedRun:
    corpora = tmp_path / "corpora"
    corpora.mkdir()
    for name, count in (("web", 300), ("code", 120)):
        text = tmp_path / f"{name}.txt"
        text.write_text("\n\n".join(f"{name} {i} " + "x" * (i * 7 % 90) for i in range(count)))
        prepare([text], corpora / name, PrepareOptions(text_unit="paragraph", workers=1))
    data = tmp_path / "data.yaml"
    sources = {name: {"path": f"corpora/{name}", "weight": weight} for name, weight in (("web", 0.7), ("code", 0.3))}
    data.write_text(
        yaml.safe_dump({"seed": 3, "seq_length": 64, "packing": "best_fit", "sources": sources}, sort_keys=False)
    )
    stream = open_stream(data)
    save = tmp_path / "ckpt"
    topology = Topology(dp=2, world_size=2, global_batch_size=8)
    record_start(save, iteration=0, state=stream.state_at(0), choice=None, topology=topology)
    for step in (4, 8, 12):
        tag = f"global_step{step}"
        state = stream.state_at(8 * step, batches=[(0, 8)])
        pending = begin_save(save, tag=tag, iteration=step, state=state, topology=topology)
        (save / tag).mkdir()
        (save / tag / "mp_rank_00_model_states.pt").write_bytes(b"weights" * step)
        commit_save(pending, expected_files=["mp_rank_00_model_states.pt"])
    assert stream.origin is not None
    write_data_config(save, stream.origin)
    return SavedRun(data=data, save=save, corpora=corpora)
