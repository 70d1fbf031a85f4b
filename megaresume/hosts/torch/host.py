"""What the hosts of trainers and loops have in common: `StepHost`, and what their functions check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from megaresume.batches.data_loader import DataLoader
from megaresume.checkpoint.choosing.search import Choice
from megaresume.checkpoint.data_state import Envelope
from megaresume.checkpoint.session.file_errors import writing
from megaresume.checkpoint.session.host import Host, Reading, Save
from megaresume.checkpoint.session.ranks import on_all_ranks
from megaresume.checkpoint.session.settings import Checkpoints
from megaresume.checkpoint.step_file import StepFile
from megaresume.checkpoint.topology import Topology
from megaresume.hosts.instances import refuse
from megaresume.hosts.torch.background import Background
from megaresume.hosts.torch.feeds import Feed
from megaresume.hosts.torch.steps import Steps
from megaresume.stream.errors import UsageError

T = TypeVar("T")


class StepHost(Host):
    """What a host answers that trains by `Steps`: see `megaresume.checkpoint.session.host.Host`; and what it does at a
    save and at a load."""

    #: what it has trained.
    steps: Steps
    #: what writes while training goes on; None: nothing does.
    background: Background | None = None

    def iteration(self) -> int:
        """See `Host`."""
        return self.steps.step

    def samples(self) -> int:
        """See `Host`."""
        return self.steps.samples

    def topology(self) -> Topology:
        """See `Host`."""
        return self.steps.feed.topology(self.samples())

    def settle(self) -> None:
        """See `Host`."""
        if self.background is not None:
            self.background.settle()

    def is_saving(self) -> bool:
        """See `Host`."""
        return self.background is not None and self.background.is_saving()

    @property
    def save_dir(self) -> Path:
        """Where the run saves: `check_checkpoints` and `of_trainer` see to it that it is known."""
        save_dir = self.steps.session.save_dir
        assert save_dir is not None
        return save_dir

    def held(self, save: Save) -> dict[str, Any]:
        """What a checkpoint holds besides the weights, by plain names: data state, optimizer steps, samples."""
        return {"data": save.envelope.to_text(), "step": self.steps.step, "samples": self.steps.samples}

    def go_on(self, held: Mapping[str, Any]) -> Reading:
        """From what `held` gave, which was read with the weights."""
        self.steps.loaded(held["step"], held["samples"])
        return Reading(envelope=Envelope.read(held["data"]), iteration=held["step"], samples=held["samples"])

    def load_by(
        self,
        read: Callable[[Choice, StepFile | None], Reading],
        tag_dir: Path | None = None,
        *,
        root: Path | None = None,
    ) -> Any:
        """`Session.load`; nothing is trained any more if it fails.

        Args:
            read: the files of this rank; is also given what lies beside them.
            tag_dir: exactly this checkpoint; None: the newest complete one.
            root: that it is looked for in; None: where the run saves.
        """
        session = self.steps.session
        root, pick = (root or self.save_dir, None) if tag_dir is None else (tag_dir.parent, session.exactly(tag_dir))
        with self.steps.loading():
            return session.load(root, read, pick=pick)


def write_all(save: Save, write: Callable[[], T]) -> T:
    """Write the files of this rank of a save; if that fails on one rank, every rank raises, in our words."""

    def write_files() -> T:
        with writing(save.tag_dir):
            return write()

    return on_all_ranks(write_files)


def check_sizes(
    feed: Feed, loader: str, trainer: str, sizes: Mapping[str, tuple[Any, Any, str]], *, layout: str, length: str
) -> None:
    """Refuse a loader for other ranks or steps than those of the trainer that reads from it.

    Args:
        feed: of the loader.
        loader, trainer: what they are called, for errors.
        sizes: by name, that of the loader, that of the trainer, and what makes the two equal.
        layout: of the trainer, for errors.
        length: its setting for the length of the run.

    Raises:
        UsageError: naming the first; or the data may end with a short step, which no such trainer can train.
    """
    if isinstance(feed.loader, DataLoader):
        feed.loader.ends_elsewhere = True
    for name, (found, expected, action) in sizes.items():
        if found != expected:
            raise UsageError(
                f"the {loader} and the {trainer} have different ideas of {name}",
                found=f"{found}, of the {loader}",
                expected=f"{expected}, of the {trainer}: {layout}",
                action=f"make the {loader} with {action}",
            )
    ends = any(source.max_epochs is not None for source in feed.stream.config.sources)
    if ends and not feed.whole_steps:
        raise UsageError(
            f"the last step of the data may be short, which the {trainer} cannot train",
            found="a DataLoader with max_epochs",
            expected="whole steps",
            action=f"drop_last=True leaves out what is over; or no max_epochs, and {length} for the length",
        )


def of_trainer(checkpoints: Checkpoints, *, save_dir: tuple[str, Any], keep_last: tuple[str, Any]) -> Checkpoints:
    """The settings under a trainer that says by itself where it saves, and how many checkpoints it keeps.

    Args:
        checkpoints: with neither of the two.
        save_dir, keep_last: how its own setting is called, and what it says.

    Raises:
        UsageError: one of them was given here as well, or one that is DeepSpeed's.
    """
    own = {"save_dir": f"set {save_dir[0]}", "keep_last": f"set {keep_last[0]}"}
    own |= dict.fromkeys(("elastic", "adopt"), "leave it out: it is DeepSpeed's")
    found = {name: getattr(checkpoints, name) for name in own}
    refuse(
        {name: (found[name] and f"Checkpoints({name}={found[name]!r})", own[name]) for name in own},
        expected="not set",
    )
    return replace(checkpoints, save_dir=save_dir[1], keep_last=keep_last[1] or None)
