"""What fails inside DeepSpeed on a file is raised with what it means; what is known already goes through."""

from __future__ import annotations

import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from megaresume.checkpoint.file_errors import reading, writing
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.records.manifest import FileEntry, Manifest
from megaresume.stream.errors import CheckpointError, StateError


def pickle_tensor(tensor: Any, path: Path) -> None:
    """Write it without torch's own writer."""
    path.write_bytes(pickle.dumps(tensor))


def choice(directory: Path, checksum: str | None) -> Choice:
    files = (FileEntry(path="a.pt", size=4, checksum=checksum),)
    manifest = Manifest(iteration=4, tag="global_step4", save_id="0", digest="0", files=files)
    return Choice(load_dir=directory, tag="global_step4", iteration=4, record=None, manifest=manifest)


@pytest.mark.parametrize(("checksum", "words"), [("0" * 32, "files; to resume"), (None, "that were saved with")])
def test_a_file_that_torch_cannot_read(tmp_path: Path, checksum: str | None, words: str) -> None:
    (tmp_path / "a.pt").write_bytes(b"PK\3\4")
    refused = pytest.raises(CheckpointError, match="the checkpoint global_step4 cannot be read")
    with refused as caught, reading(choice(tmp_path, checksum)):
        torch.load(tmp_path / "a.pt")
    assert "PytorchStreamReader" in str(caught.value) and words in str(caught.value.action)
    assert f"megaresume inspect {tmp_path} --checksums" in str(caught.value.action)


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    refused = pytest.raises(CheckpointError, match="the files of the checkpoint global_step4 could not be written")
    with refused as caught, writing(tmp_path / "global_step4"):
        raise OSError(28, "No space left on device")
    assert "No space left on device" in str(caught.value) and "GB are free in" in str(caught.value)
    assert caught.value.cause == "the disk is full"


@pytest.mark.parametrize("save", [pickle_tensor, torch.save])
def test_a_limit_on_the_size_of_files(tmp_path: Path, save: Callable[[Any, Path], None]) -> None:
    """Then the disk is not full. torch's own writer does not hand on what the system says."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    refused = pytest.raises(CheckpointError, match="the files of the checkpoint global_step4 could not be written")
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    try:
        with refused as caught, writing(tmp_path / "global_step4"):
            save(torch.zeros(100_000), tmp_path / "a.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ("the disk is full" in str(caught.value.cause)) == (save is torch.save)
    assert "ulimit -f" in str(caught.value)
    assert str(caught.value.action).endswith("; then start again: checkpoints before this one are untouched")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_disk_in_the_words_of_others(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(CheckpointError) as caught, writing(tmp_path / "global_step4"):
        raise error
    assert "disk is full" in str(caught.value.cause)


def test_a_disk_that_is_full_on_another_rank(tmp_path: Path) -> None:
    failed = CheckpointException("write", {1: (OSError(28, "No space left on device"), StackSummary())})
    with pytest.raises(CheckpointError) as caught, writing(tmp_path / "global_step4"):
        raise RuntimeError(str(failed)) from failed
    assert "No space left" in str(caught.value.found) and "disk is full" in str(caught.value.cause)


def test_an_error_that_no_disk_raises(tmp_path: Path) -> None:
    def save(model: object) -> None:
        torch.save(model, tmp_path / "a.pt")

    with pytest.raises(CheckpointError, match="could not be written") as caught, writing(tmp_path / "global_step4"):
        save(lambda: None)  # cannot be pickled
    assert "<lambda>" in str(caught.value.found) and "is full" not in str(caught.value)


def test_what_a_rank_has_said_in_a_distributed_load(tmp_path: Path) -> None:
    """torch's own first line names the ranks, and not what is wrong."""
    failed = CheckpointException("read", {1: (EOFError("Ran out of input"), StackSummary())})
    with pytest.raises(CheckpointError) as caught, reading(choice(tmp_path, None)):
        raise RuntimeError(str(failed)) from failed
    assert caught.value.found == "rank 1: EOFError: Ran out of input"


def test_what_is_known_goes_through(tmp_path: Path) -> None:
    for error in (StateError("ours"), RuntimeError("[.../gloo/transport/tcp/pair.cc] Connection closed by peer")):
        with pytest.raises(type(error)) as caught, reading(choice(tmp_path, None)):
            raise error
        assert caught.value is error
