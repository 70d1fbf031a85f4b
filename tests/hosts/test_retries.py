"""When a save is tried again, how long that waits, and what follows the last try. With real engines: test_full_disk."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megaresume.checkpoint.ranks import known_to_all
from megaresume.checkpoint.save.retries import Retries, may_pass
from megaresume.files import write_error
from megaresume.stream.errors import CheckpointError, UsageError


def test_a_path_through_a_file() -> None:
    error = write_error(Path("file/run"), OSError(errno.ENOTDIR, "Not a directory"))
    assert error.action == "save to another directory, or move that file away"


def _full() -> CheckpointError:
    error = write_error("place", OSError(errno.ENOSPC, "No space left on device"))  # type: ignore[arg-type]
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    return known_to_all(error)


def _run(retries: Retries, failures: int, **options: Any) -> tuple[Any, list[str]]:
    """What a save gives or raises that fails so often, and what was done."""
    done: list[str] = []

    def save() -> str:
        done.append("save")
        if done.count("save") <= failures:
            raise options.get("error", _full)()
        return "saved"

    try:
        result = retries.run(
            save,
            tag="global_step4",
            is_last=options.get("is_last", False),
            seconds_left=lambda: options.get("left"),
            give_up=lambda: done.append("give up"),
        )
    except CheckpointError as error:
        result = error
    return result, done


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_reasons_that_may_pass(number: int) -> None:
    error = CheckpointError("cannot write")
    error.__cause__ = OSError(number, "words")
    assert may_pass(error)


def test_reasons_that_do_not() -> None:
    for reason in (OSError(errno.EROFS, ""), OSError(errno.EACCES, ""), RuntimeError("shapes differ"), None):
        error = CheckpointError("cannot write")
        error.__cause__ = reason
        assert not may_pass(error)


def test_what_torch_says_of_a_full_disk() -> None:
    with pytest.raises((OSError, RuntimeError)) as caught:
        torch.save(torch.zeros(9999), "/dev/full")
    assert may_pass(caught.value)
    with pytest.raises((OSError, RuntimeError)) as caught, open("/dev/full", "wb", buffering=0) as file:
        torch.save(torch.zeros(9999), file)
    assert may_pass(caught.value)


def test_the_waits_grow(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(Retries(tries=3, wait=0.001), 2) == ("saved", ["save"] * 3)
    lines = capsys.readouterr().out.splitlines()
    assert [line.rsplit("; ", 1)[1] for line in lines] == ["try 1 of 3 in 0.001 s", "try 2 of 3 in 0.002 s"]
    assert "global_step4 was not saved: cannot write place (No space left on device)" in lines[0]


def test_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    result, done = _run(Retries(tries=1, wait=0), 9)
    assert isinstance(result, CheckpointError) and done == ["save", "save", "give up"]
    assert capsys.readouterr().out.endswith("; the run ends\n")
    assert _run(Retries(tries=1, wait=0, on_failure="continue"), 9) == (None, ["save", "save", "give up"])
    assert capsys.readouterr().out.endswith("; the run continues without this checkpoint\n")


def test_a_run_that_stops_does_not_go_on_without_its_last_checkpoint() -> None:
    result, _ = _run(Retries(on_failure="continue"), 9, is_last=True)
    assert isinstance(result, CheckpointError)


def test_no_wait_goes_beyond_the_end_of_the_job() -> None:
    result, done = _run(Retries(tries=3, wait=600), 9, left=500.0)
    assert isinstance(result, CheckpointError) and done == ["save", "give up"]


@pytest.mark.parametrize("error", [lambda: known_to_all(CheckpointError("another job")), lambda: CheckpointError("x")])
def test_what_is_raised_at_once(error: Callable[[], CheckpointError]) -> None:
    """A reason that stays; and an error that only this rank has, whose others may wait for it anywhere."""
    result, done = _run(Retries(tries=3, wait=0, on_failure="continue"), 9, error=error)
    assert isinstance(result, CheckpointError) and done == ["save"]


def test_numbers_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="cannot be retried") as caught:
        Retries(tries=-1)
    assert "save_retries=-1" in str(caught.value)
