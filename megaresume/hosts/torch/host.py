"""What the hosts of trainers and loops have in common: `StepHost`, and what their functions check and hook."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaresume.checkpoint.topology import Topology
from megaresume.hosts.torch.steps import Steps
from megaresume.session.settings import Checkpoints
from megaresume.stream.errors import UsageError


class StepHost:
    """What a host answers that trains by `Steps` and writes nothing in the background: see
    `megaresume.session.host.Host`."""

    #: what it has trained.
    steps: Steps

    def iteration(self) -> int:
        """See `Host`."""
        return self.steps.step

    def samples(self) -> int:
        """See `Host`."""
        return self.steps.trained

    def topology(self) -> Topology:
        """See `Host`."""
        return self.steps.feed.topology(self.steps.trained)

    def expected_files(self, save_dir: Path, tag: str) -> Sequence[str] | None:
        """See `Host`: what is written depends on the model and the settings."""
        return None

    def settle(self) -> None:
        """See `Host`."""

    def is_saving(self) -> bool:
        """See `Host`."""
        return False

    def committed(self, save_dir: Path) -> None:
        """See `Host`."""


def hook(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a method of one instance by ``function``, which is given the method before its arguments."""
    before = getattr(owner, name)
    setattr(owner, name, functools.wraps(before)(functools.partial(function, before)))


def refuse(function: str, refused: Mapping[str, tuple[Any, str]], *, expected: str | None = None) -> None:
    """Refuse what would be other data, or is not known to work.

    Args:
        function: for errors: "attach_trainer".
        refused: by name, what was found (nothing, if that is false) and the way out.
        expected: in place of what was found, if that is more than True.

    Raises:
        UsageError: naming the first.
    """
    for name, (found, action) in refused.items():
        if found:
            raise UsageError(
                f"{name} cannot be used with {function}",
                found=f"{name}: {found}",
                expected="not set" if found is True else expected,
                action=action,
            )


def of_trainer(
    checkpoints: Checkpoints, function: str, *, save_dir: tuple[str, Any], keep_last: tuple[str, Any]
) -> Checkpoints:
    """The settings under a trainer that says by itself where it saves, and how many checkpoints it keeps.

    Args:
        checkpoints: with neither of the two.
        function: for errors: "attach_trainer".
        save_dir, keep_last: how its own setting is called, and what it says.

    Raises:
        UsageError: one of them was given here as well, or one that is DeepSpeed's.
    """
    own = {"save_dir": f"set {save_dir[0]}", "keep_last": f"set {keep_last[0]}"}
    for name, action in (own | dict.fromkeys(("elastic", "adopt"), "leave it out: it is DeepSpeed's")).items():
        if found := getattr(checkpoints, name):
            raise UsageError(
                f"{name} cannot be used with {function}",
                found=f"Checkpoints({name}={found!r})",
                expected="not set",
                action=action,
            )
    return replace(checkpoints, save_dir=save_dir[1], keep_last=keep_last[1] or None)
