"""Saves that DeepSpeed writes while training continues (``checkpoint.writer.decoupled``): committed after the last
byte.

    save_checkpoint    values captured, marker; DeepSpeed passes the state to a writer process of each rank and returns
    the next steps     forward and backward, while the writers write
    engine.step        before the weights change, DeepSpeed waits for its writers; then, with all ranks there,
                       state, manifest, pointers and ledger with the captured values

The same happens before the next save or load, in ``engine.destroy``, and at the end of the program, where ranks can no
longer communicate: there each rank leaves a file when its writer is done, and rank 0 waits for these files.

A kill in between leaves a save with a marker and no manifest: the previous checkpoint stays valid. A writer would
outlive its rank, and might write into a tag that the next start also writes: a guard ends it.
"""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from megaresume.checkpoint.ending import before_end
from megaresume.checkpoint.ranks import known_to_all, on_all_ranks, on_rank_0, rank, world_size
from megaresume.checkpoint.records.names import records_dir
from megaresume.checkpoint.save.commit import PendingCheckpoint
from megaresume.files import write_error
from megaresume.hosts.attach import hook
from megaresume.hosts.deepspeed import engine as facts
from megaresume.stream.errors import CheckpointError, MegaresumeError, UsageError

if TYPE_CHECKING:
    from megaresume.checkpoint.copies.parts import Parts

_SLOT = "_megaresume_in_flight"

#: Seconds that rank 0 waits when it exits for the others' writers; after an error, they may never come.
_PATIENCE, _PATIENCE_IN_ERROR = 300.0, 20.0

#: Ends the writer argv[1] when the process that started this one is gone; ends itself when the writer has ended.
_GUARD = """
import os, sys, time
parent, writer = os.getppid(), int(sys.argv[1])
while True:
    try:
        os.kill(writer, 0)
    except OSError:
        break
    if os.getppid() != parent:
        os.kill(writer, 9)
        break
    time.sleep(0.1)
"""


@dataclass(slots=True)
class _Flight:
    """The save in progress of an engine."""

    pending: PendingCheckpoint | None = None
    #: on rank 0, called once all ranks have written.
    commit: Callable[[], object] | None = None
    rank: int = 0
    ranks: int = 1


def check_nodes(engine: Any, parts: Parts | None) -> None:
    """Refuse a writer that commits on rank 0 alone, if every node has its own directory. On all ranks.

    Raises:
        UsageError: both is so.
    """
    if parts is None or not facts.is_decoupled(engine):
        return
    raise known_to_all(
        UsageError(
            "this writer in the background needs a directory that all nodes see",
            found=f"{parts.nodes.number} nodes that save to disks of their own",
            expected="one directory, or a writer of the training process",
            cause="rank 0 commits what it writes, and does not see the files of the other nodes",
            action="switch it off: remove checkpoint.writer from the DeepSpeed config",
        )
    )


def watch(engine: Any) -> None:
    """Ensure that what this engine's writer writes is committed, and can be loaded. Once per engine; does nothing for
    an engine without ``checkpoint.writer``.
    """
    if not facts.has_writer(engine) or hasattr(engine, _SLOT):
        return
    writer = engine.checkpoint_engine
    setattr(engine, _SLOT, _Flight())
    # As in DeepSpeed's usual checkpoint engine: a checkpoint contains more than tensors.
    writer.load = functools.partial(torch.load, weights_only=False)
    if facts.zero_stage(engine) < 3 and facts.data_rank(engine) != 0:
        # DeepSpeed makes every rank with a writer write the model's single file, all at the same time.
        engine.save_non_zero_checkpoint = False
    if not facts.is_decoupled(engine):
        return
    engine._commit_decoupled_checkpoint = functools.partial(_settle_weakly, weakref.ref(engine))
    hook(engine, "destroy", functools.partial(_destroy, weakref.ref(engine)))
    hook(writer, "save", functools.partial(_save_copy, weakref.ref(engine)))
    # DeepSpeed measures its first checkpoint with collectives in between the ranks' waiting: a rank that fails alone
    # would leave the others there.
    writer.checkpoint_size._gigabytes = math.nan
    if writer.ckpt_process is not None:
        subprocess.Popen([sys.executable, "-S", "-E", "-c", _GUARD, str(writer.ckpt_process.pid)])
    before_end(functools.partial(_at_exit, weakref.ref(engine)))


def check_writer(engine: Any) -> None:
    """Raise a CheckpointError if the writer is dead: DeepSpeed would pass it the state without noticing."""
    process = engine.checkpoint_engine.ckpt_process if facts.is_decoupled(engine) else None
    if process is not None and not process.is_alive():
        raise _lost("the next checkpoint", f"the writer process {process.pid} has ended, {_ending(process)}")


def defer(engine: Any, pending: PendingCheckpoint, commit: Callable[[], object]) -> None:
    """Commit this save when its writers are done."""
    setattr(engine, _SLOT, _Flight(pending=pending, commit=commit, rank=rank(), ranks=world_size()))


def is_pending(engine: Any) -> bool:
    """Whether a save is being written that is not yet committed."""
    flight: _Flight | None = getattr(engine, _SLOT, None)
    return flight is not None and flight.pending is not None


def settle(engine: Any) -> None:
    """Wait for the save in progress and commit it; does nothing without one. Collective.

    Raises, on every rank:
        CheckpointError: a writer failed, or the commit did; the pointers are unchanged.
    """
    flight: _Flight | None = getattr(engine, _SLOT, None)
    if flight is None:
        return
    setattr(engine, _SLOT, _Flight())
    on_all_ranks(lambda: _wait(engine, flight))
    if flight.commit is not None:
        on_rank_0(flight.commit)


def _wait(engine: Any, flight: _Flight) -> None:
    """Wait until this rank's writer has written everything."""
    writer = engine.checkpoint_engine
    info = writer.get_commit_info()
    if info is None:
        return
    try:
        writer.commit(info)
    except Exception as error:
        writer.commit_info = None  # it is finished; DeepSpeed would wait for it once more at its end
        tag = info.tag if flight.pending is None else flight.pending.record.tag
        raise _lost(str(tag), str(error)) from error


def _lost(what: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"{what} was not written in the background; the pointers stay as they were",
        found=found,
        expected="a writer process that writes what it is given",
        cause="the disk is full, the directory was removed, or the process was killed for memory: /dev/shm holds what "
        "is handed to it",
        action="look at the log of this rank for 'Checkpoint subprocess crashed'; then start again from the "
        "checkpoint before it",
    )


def _ending(process: Any) -> str:
    code = process.exitcode
    return "not known how" if code is None else f"by signal {-code}" if code < 0 else f"with status {code}"


def _settle_weakly(reference: weakref.ref[Any]) -> None:
    engine = reference()
    if engine is not None:
        settle(engine)


def _destroy(reference: weakref.ref[Any], destroy: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    _settle_weakly(reference)
    return destroy(*args, **kwargs)


def _save_copy(reference: weakref.ref[Any], save: Callable[..., Any], state_dict: Any, path: str) -> Any:
    """The writer's ``save``, for a state that can be sent to another process, where training does not change it."""
    engine = reference()
    # ZeRO 1 keeps its weights as slices that require gradients, which torch refuses to send.
    state_dict = _pytree.tree_map(lambda x: x.detach() if getattr(x, "requires_grad", False) else x, state_dict)
    module = state_dict.get("module")
    if engine is not None and isinstance(module, dict):
        # Weights change in the step, after the wait; but buffers in the forward pass, while they are written.
        names = [name for name, _ in engine.module.named_buffers() if name in module]
        state_dict = {**state_dict, "module": {**module, **{name: module[name].clone() for name in names}}}
    return save(state_dict, path)


# The end of the program


def _at_exit(reference: weakref.ref[Any]) -> None:
    engine = reference()
    flight: _Flight | None = None if engine is None else getattr(engine, _SLOT, None)
    if engine is None or flight is None:
        return
    setattr(engine, _SLOT, _Flight())
    try:
        if flight.pending is not None:
            _finish_alone(engine, flight, flight.pending)
    except (MegaresumeError, OSError) as error:
        print(f"megaresume: error: rank {flight.rank}: {error}", file=sys.stderr, flush=True)
    finally:
        engine.checkpoint_engine.cleanup()  # the program would wait for its writer forever


def _finish_alone(engine: Any, flight: _Flight, pending: PendingCheckpoint) -> None:
    """Commit without communicating with the other ranks, except through files."""
    tag, where = pending.record.tag, records_dir(pending.save_dir)
    if flight.rank == 0:
        print(
            f"megaresume: the program ends while {tag} is being written: waiting for it. engine.destroy() does so, "
            "too, and raises what goes wrong",
            file=sys.stderr,
            flush=True,
        )
    _wait(engine, flight)
    written = [where / f".{pending.record.save_id}.{number}.written" for number in range(flight.ranks)]
    try:
        written[flight.rank].touch()
    except OSError as error:
        raise write_error(written[flight.rank], error) from error
    if flight.rank == 0 and flight.commit is not None:
        _wait_for(written, _PATIENCE if getattr(sys, "last_value", None) is None else _PATIENCE_IN_ERROR, tag)
        flight.commit()
        for path in written:
            path.unlink(missing_ok=True)


def _wait_for(paths: list[Path], seconds: float, tag: str) -> None:
    deadline = time.monotonic() + seconds
    while missing := [path for path in paths if not path.exists()]:
        if time.monotonic() >= deadline:
            raise CheckpointError(
                f"{tag} was not committed; the pointers stay as they were",
                found=f"{len(missing)} of {len(paths)} ranks have not written their part after {seconds:.0f} s",
                expected="all ranks at the end of the program",
                cause="a rank ended before the others, or hangs",
                action="see the output of the other ranks; the run continues from its newest checkpoint",
            )
        time.sleep(0.1)
