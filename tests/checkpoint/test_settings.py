"""Settings are checked by the types of their fields when they are made, not in the middle of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaresume.checkpoint.settings import GROUPS, Checkpoints, DataOptions, LoaderOptions
from megaresume.checkpoint.stopping import StopConditions
from megaresume.stream.errors import UsageError


@pytest.mark.parametrize(
    ("group", "name", "value", "expected", "action"),
    [
        (Checkpoints, "keep_last", "3", "a whole number, or None", "write Checkpoints(keep_last=3)"),
        (Checkpoints, "keep_last", 3.0, "a whole number, or None", "write Checkpoints(keep_last=3)"),
        (Checkpoints, "keep_last", True, "a whole number, or None", "correct keep_last"),
        (Checkpoints, "save_dir", 5, "a text, or a path, or None", "correct save_dir"),
        (Checkpoints, "checksums", "False", "True or False", "write Checkpoints(checksums=False)"),
        (StopConditions, "after_minutes", "30", "a number, or None", "write StopConditions(after_minutes=30)"),
        (StopConditions, "before_end", "30m", "a number, or 'auto', or None", "correct before_end"),
        (StopConditions, "before_end", True, "a number, or 'auto', or None", "correct before_end"),
        (StopConditions, "signals", "SIGTERM", "a list, each a text", "write StopConditions(signals=('SIGTERM',))"),
        (StopConditions, "signals", (15,), "a list, each a text", "correct signals"),
        (DataOptions, "on_change", "stag", "'refuse' or 'stage'", "correct on_change"),
        (DataOptions, "objects", [1], "a mapping, or None", "correct objects"),
        (LoaderOptions, "transform", 3, "a function, or None", "correct transform"),
    ],
)
def test_of_another_type(group: Any, name: str, value: Any, expected: str, action: str) -> None:
    with pytest.raises(UsageError, match=f"bad value of {name}") as caught:
        group(**{name: value})
    assert caught.value.found == f"{group.__name__}({name}={value!r})"
    assert (caught.value.expected, caught.value.action) == (expected, action)


def test_the_nearest_word() -> None:
    with pytest.raises(UsageError, match="did you mean 'continue'"):
        Checkpoints(on_save_failure="contine")  # type: ignore[arg-type]


def test_unknown_settings() -> None:
    with pytest.raises(UsageError, match="unknown argument of Checkpoints") as caught:
        Checkpoints(keep_lats=3)  # type: ignore[call-arg]
    assert (caught.value.found, caught.value.action) == ("Checkpoints(keep_lats=3)", "write keep_last")
    assert caught.value.cause == "did you mean 'keep_last'?"
    with pytest.raises(
        UsageError, match=r"unknown argument of LoaderOptions(.|\n)*num_workers(.|\n)*docs/settings\.md"
    ):
        LoaderOptions(zzz=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("group", "value", "action"),
    [
        (Checkpoints, "run", "write Checkpoints(save_dir='run')"),
        (StopConditions, 60, "write StopConditions(after_minutes=60)"),
        (LoaderOptions, 4, "write LoaderOptions(num_workers=4)"),
    ],
)
def test_settings_without_names(group: Any, value: Any, action: str) -> None:
    with pytest.raises(UsageError, match="takes its settings by name") as caught:
        group(value)
    assert caught.value.action == action


@pytest.mark.parametrize("name", ["keep_last", "keep_every"])
def test_nothing_kept(name: str) -> None:
    flag = f"--megaresume-{name.replace('_', '-')}"
    with pytest.raises(
        UsageError, match=rf"{name} must be at least 1(.|\n)*{name}=0(.|\n)*leave out {name} \({flag}\)"
    ):
        _ = Checkpoints(**{name: 0}).retention  # type: ignore[arg-type]


def test_what_is_as_good() -> None:
    """Numbers of numpy, paths, lists for tuples; and None where it is allowed."""
    assert Checkpoints(keep_last=np.int64(3), save_retry_wait=2, save_dir=Path("run")).keep_last == 3  # type: ignore[arg-type]
    assert StopConditions(signals=["SIGTERM"], file=Path("stop"), after_minutes=np.float32(0.5))  # type: ignore[arg-type]
    assert LoaderOptions(fields=["labels"], pin_memory=None, transform=None).fields == ["labels"]


def test_every_setting_has_a_type_that_is_checked() -> None:
    """A type that the check does not know would be a KeyError."""
    for group in GROUPS.values():
        for name in group.__dataclass_fields__.keys() - {"skip", "metrics"}:  # these are Any
            with pytest.raises(UsageError, match=f"bad value of {name}"):
                group(**{name: object()})
