"""A loader with a state of its own under Megatron's ``--dataloader-type external``.

    def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
        ...
        return train_loader, valid_loader, test_loader      # Energon's or torchdata's; None on ranks without data
    pretrain(megaresume.provider(train_valid_test_datasets_provider), ...)

The clock is ``args.consumed_train_samples``: a checkpoint of it holds the states after exactly those samples, whatever
was fetched beyond. The states are written beside the checkpoint before its commit, and restored when the data is built.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaresume.checkpoint.choosing.search import Choice
from megaresume.checkpoint.data_state import DataState
from megaresume.checkpoint.manifest import FileEntry
from megaresume.checkpoint.session.host import Data
from megaresume.checkpoint.session.ranks import on_all_ranks
from megaresume.hosts.loader_states import NO_LOADER, Captured, LoaderRecord, capture, restore_states
from megaresume.hosts.loaders import LoaderReader, adapter_of
from megaresume.hosts.megatron.host import MegatronHost
from megaresume.hosts.megatron.load_rules import BEGIN_ANEW
from megaresume.stream.errors import StateError, UsageError


class MicroBatchesOfLoader:
    """The training loader as Megatron iterates it: ``iter()`` changes nothing, and it never ends."""

    def __init__(self, reader: LoaderReader) -> None:
        self.reader = reader

    def __iter__(self) -> MicroBatchesOfLoader:
        return self

    def __next__(self) -> Any:
        """The next micro-batch, as the loader made it."""
        return next(self.reader)


class LoaderOrder(Data):
    """A training loader of the script's own.

    Args:
        host: of which the checkpoint is loaded.
        layout: data-parallel rank and size.
    """

    def __init__(self, host: MegatronHost, layout: tuple[int, int]) -> None:
        self._args = host.args
        self.dp_rank, self.dp = layout
        self.reader: LoaderReader | None = None
        self._base = host.samples()
        #: where this process began, and at the last `prepare`.
        self._states: list[DataState] = [NO_LOADER.to_state(0) if host.loaded is None else host.loaded.state]
        self.record = NO_LOADER if host.loaded is None else LoaderRecord.from_state(host.loaded.state)
        self._captured: Captured | None = None

    def trained(self) -> int:
        """Batches of each data-parallel rank that ``consumed_train_samples`` stands for."""
        samples = int(self._args.consumed_train_samples) - self._base
        return self.record.batches + samples // (self.dp * int(self._args.micro_batch_size))

    def attach(self, loader: Any) -> MicroBatchesOfLoader | None:
        """Take the training loader of this process."""
        if loader is None:
            return None
        if self.reader is not None:
            raise UsageError(
                "this process has two training loaders",
                found="a provider that makes one for every virtual-pipeline chunk",
                expected="one, on the process that sends its batches to the chunks",
                action="return None where vp_stage is not 0",
            )
        self.reader = LoaderReader(adapter_of(loader), self.trained)
        return MicroBatchesOfLoader(self.reader)

    def prepare(self) -> None:
        """See `Data`: the states of all ranks' loaders for exactly the consumed samples."""
        sizes = ((0, int(self._args.global_batch_size)),)
        self._captured = capture(
            self.reader, dp_rank=self.dp_rank, dp_size=self.dp, trained=self.trained(), sizes=sizes
        )
        self._states[1:] = [self._captured.record.to_state(int(self._args.consumed_train_samples))]

    def snapshot(self, samples: int) -> DataState:
        """See `Data`."""
        return next(state for state in reversed(self._states) if state.samples == samples)

    def write_files(self, save_dir: Path, iteration: int, tag: str) -> tuple[FileEntry, ...]:
        """See `Data`."""
        assert self._captured is not None
        return self._captured.write(save_dir, iteration, tag)

    def restore(self, state: DataState, choice: Choice) -> None:
        """See `Data`."""
        restore_states(
            self.reader,
            LoaderRecord.from_state(state),
            root=choice.load_dir,
            iteration=choice.iteration or 0,
            tag=choice.tag,
            dp_rank=self.dp_rank,
            dp=self.dp,
        )


def build_with_loaders(current: MegatronHost, original: Callable[..., Any], provider: Callable[..., Any]) -> Any:
    """Megatron's ``build_train_valid_test_data_iterators`` over loaders, restored where training continues. Collective.

    Raises, on every rank:
        StateError: training continues and there is no state, or it does not fit (`restore_states`).
        UsageError: a loader without a state.
    """
    from megaresume.hosts.megatron.checkpointing import after_data_is_built
    from megaresume.hosts.megatron.data.provider import data_parallel

    on_all_ranks(lambda: _check(current))
    is_first = not isinstance(current.order, LoaderOrder)
    order = on_all_ranks(lambda: LoaderOrder(current, data_parallel(current.project))) if is_first else current.order
    assert isinstance(order, LoaderOrder)
    failed: list[Exception] = []

    @functools.wraps(provider)
    def provide(*args: Any, **kwargs: Any) -> Any:
        train, *others = provider(*args, **kwargs)
        try:
            return (order.attach(train), *others)
        except Exception as error:  # noqa: BLE001  raised below, on all ranks: this runs on some of them only
            failed.append(error)
            return (None, *others)

    result = original(provide)

    def check() -> None:
        for error in failed:
            raise error

    on_all_ranks(check)
    if is_first:
        current.order = order
        after_data_is_built(current)
    return result


def _check(current: MegatronHost) -> None:
    args, loaded = current.args, current.loaded
    position = int(args.consumed_train_samples)
    if position and (loaded is None or loaded.kind != "loader" or loaded.samples != position):
        has = "none" if loaded is None else f"{loaded.kind}, sample {loaded.samples}"
        raise StateError(
            "training continues, but no state of the loader belongs to its position",
            found=f"iteration {args.iteration}, {position} samples trained; state in the checkpoint: {has}",
            expected=f"the states of all loaders after sample {position}",
            cause="it was saved without megaresume or with another --dataloader-type; or the counter was overridden",
            action=f"start the data over: {BEGIN_ANEW}; or load a checkpoint that has them: megaresume inspect DIR",
        )
