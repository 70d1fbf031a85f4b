"""`AcceleratedLoop`: a training loop with Accelerate; `AcceleratorHost`: the host of its session.

Hooked on the instances:

    optimizer.step           where gradients are synchronised, a step was made; under DeepSpeed, engine.step, which
                             accelerator.backward calls
    accelerator.save_state   saved by the session: commit, lock, ledger, retention
    accelerator.load_state   the newest complete checkpoint, or the one that is asked for
    accelerator.prepare, skip_first_batches   refused for this loader: it is prepared, and goes on by itself
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaresume.checkpoint.choosing.search import Choice
from megaresume.checkpoint.paths import hugging_face_tag, parse_record_name, records_dir
from megaresume.checkpoint.session.host import Reading, Resume, Save
from megaresume.checkpoint.session.ranks import all_come, on_all_ranks, on_rank_0
from megaresume.checkpoint.session.session import Session
from megaresume.checkpoint.step_file import StepFile
from megaresume.checkpoint.topology import Topology
from megaresume.hosts.deepspeed.engine import forget_gradients
from megaresume.hosts.hugging_face.backends import (
    Written,
    check_loadable,
    engine_of,
    expected_files,
    failing_late,
    zero_stage,
)
from megaresume.hosts.instances import hook, replaced
from megaresume.hosts.torch.host import StepHost, write_all
from megaresume.hosts.torch.loop import StepLoop
from megaresume.hosts.torch.steps import Steps
from megaresume.stream.errors import UsageError

#: see `check_loadable`.
WRITTEN: Written = {
    "DeepSpeed": (("pytorch_model/*",), "DeepSpeed: Accelerator(deepspeed_plugin=...), or accelerate launch"),
    "FSDP": (("pytorch_model_fsdp*",), "FSDP: Accelerator(fsdp_plugin=...), or accelerate launch"),
    "DDP": (("model*.safetensors", "pytorch_model.bin", "pytorch_model_[0-9]*.bin"), "neither DeepSpeed nor FSDP"),
}


class DataRecord:
    """What rides in a checkpoint of Accelerate's, as an object that is registered for checkpointing: the last one."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Data state, optimizer steps and samples."""
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` gave."""
        self.held = state


class AcceleratorHost(StepHost):
    """See `megaresume.checkpoint.session.host.Host`.

    Args:
        accelerator: Accelerate's, with models and optimizers prepared.
        steps: what the loop has trained.
    """

    forgotten = "accelerator.load_state() was not called"
    load = "accelerator.load_state() before the first step"
    begin_anew = "load its weights with safetensors.torch.load_model, and save to another directory"

    def __init__(self, accelerator: Any, steps: Steps) -> None:
        self.accelerator, self.steps, self.record = accelerator, steps, DataRecord()
        self.framework = f"accelerate {importlib.metadata.version('accelerate')}"
        #: whether Accelerate is saving or loading.
        self.is_at_files = False

    def topology(self) -> Topology:
        """See `Host`."""
        return replace(super().topology(), zero_stage=zero_stage(self.accelerator))

    def expected_files(self, save_dir: Path, tag: str) -> Sequence[str] | None:
        """See `Host`."""
        return expected_files(self.accelerator, save_dir, tag, inner=lambda _: "pytorch_model")

    def write(self, save: Save, write: Callable[[str], Any]) -> Any:
        """Write a checkpoint by Accelerate's own method ``write(directory)``."""
        self.record.held = self.held(save)

        def write_files() -> Any:
            with failing_late(self.accelerator) as errors, replaced(self, is_at_files=True):
                result = write(str(save.tag_dir))
            if errors:
                raise errors[0]
            return result

        # It deletes old checkpoints before the new one is complete, and stumbles over the records beside them.
        with replaced(self.accelerator.project_configuration, automatic_checkpoint_naming=False):
            return write_all(save, write_files)

    def read(self, choice: Choice, before: Topology | None, read: Callable[[str], Any]) -> Reading:
        """Read a checkpoint by Accelerate's own method ``read(directory)``.

        Args:
            choice: the checkpoint.
            before: how the run was laid out when it saved; None: not known.
        """

        def check_and_read() -> None:
            check_loadable(self.accelerator, choice.tag_dir, before, written=WRITTEN, begin_anew=self.begin_anew)
            with replaced(self, is_at_files=True):
                read(str(choice.tag_dir))

        on_all_ranks(check_and_read)
        self._forget_gradients()
        return self.go_on(self.record.held)

    def _forget_gradients(self) -> None:
        """Of a step that is given up."""
        if (engine := engine_of(self.accelerator)) is not None:
            forget_gradients(engine)
            return
        for optimizer in self.accelerator._optimizers:
            optimizer.optimizer.zero_grad()


class AcceleratedLoop(StepLoop):
    """The micro-batches of a training loop, on the device of the accelerator; made by `megaresume.attach`.

    Iterate over it: to the end of an epoch of a `DataLoader`, or of the data of a `StreamLoader`.
    """

    #: for Accelerate, of a loader that is read: nothing was added to fill up batches.
    remainder = -1

    def __init__(self, host: AcceleratorHost, session: Session) -> None:
        super().__init__(host, session)
        self.host = host
        accelerator = host.accelerator
        self._optimizers = list(accelerator._optimizers)
        #: those that have made the last step.
        self._made: list[Any] = []
        accelerator.register_for_checkpointing(host.record)
        engine = engine_of(accelerator)
        for owner in self._optimizers if engine is None else [engine]:
            hook(owner, "step", functools.partial(self._step, owner))
        hook(accelerator, "save_state", self._save_state)
        hook(accelerator, "load_state", self._load_state)
        hook(accelerator, "prepare", self._prepare)
        hook(accelerator, "skip_first_batches", self._skip)

    @property
    def end_of_dataloader(self) -> bool:
        """For `Accelerator.accumulate`: whether the micro-batch handed out last is the last one of its step."""
        return self.steps.is_whole

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches of this rank: see `Steps`."""
        from accelerate.utils import send_to_device

        accelerator = self.host.accelerator
        accelerator.gradient_state._add_dataloader(self)
        try:
            for batch in self.steps:
                yield send_to_device(batch, accelerator.device) if accelerator.device_placement else batch
        finally:
            accelerator.gradient_state._remove_dataloader(self)

    # The hooks

    def _step(self, optimizer: Any, step: Callable[..., Any], *args: Any, **more: Any) -> Any:
        result = step(*args, **more)
        # Under FSDP, torch makes the state of an optimizer by a step without gradients before it saves or loads it.
        if self.host.accelerator.sync_gradients and not self.host.is_at_files:
            # Another optimizer of the same step makes no other one.
            if not self.steps.is_idle or any(optimizer is one for one in self._made) or not self._made:
                self.steps.stepped()
                self._made = []
            self._made.append(optimizer)
        return result

    def save(self) -> None:
        """As ``accelerator.save_state()``."""
        self.host.accelerator.save_state()

    def _save_state(self, write: Callable[..., Any], output_dir: Any = None, *args: Any, **more: Any) -> Any:
        def check() -> Path:
            self.steps.check_save()
            self._check_prepared()
            return self._place(output_dir)

        all_come("accelerator.save_state()")
        directory = on_all_ranks(check)
        on_rank_0(lambda: _check_name(directory, self.step))
        return self.session.save(
            directory.parent,
            lambda save: self.host.write(save, lambda path: write(path, *args, **more)),
            tag=directory.name,
            tracker=False,
        )

    def _place(self, output_dir: Any) -> Path:
        """The tag directory of a save."""
        root = self.host.save_dir
        if output_dir is None or self.host.accelerator.project_configuration.automatic_checkpoint_naming:
            return root / hugging_face_tag(self.step)
        directory = Path(os.path.abspath(os.path.expanduser(output_dir)))
        if directory.parent != root:
            raise UsageError(
                "all checkpoints of a run lie in one directory",
                found=f"save_state({os.fspath(output_dir)!r})",
                expected=f"a directory in {root}",
                action="save_state() without a path; or Checkpoints(save_dir=...) of the directory that they lie in",
            )
        return directory

    def _load_state(self, read: Callable[..., Any], input_dir: Any = None, *args: Any, **more: Any) -> Resume | None:
        on_all_ranks(self._check_prepared)
        asked = None if input_dir is None else Path(os.path.abspath(os.path.expanduser(input_dir)))

        def read_files(choice: Choice, beside: StepFile | None) -> Reading:
            before = None if beside is None else beside.topology
            return self.host.read(choice, before, lambda path: read(path, *args, **more))

        self.host.load_by(read_files, asked)
        return self.session.resumed

    def _check_prepared(self) -> None:
        found = self.host.accelerator._optimizers
        if len(found) != len(self._optimizers) or any(a is not b for a, b in zip(found, self._optimizers, strict=True)):
            raise UsageError(
                "optimizers were prepared after megaresume.attach, or given up",
                found=f"{len(found)} optimizers",
                expected=f"the {len(self._optimizers)} that were prepared before",
                action="call megaresume.attach after the last accelerator.prepare",
            )
        if self.host.accelerator._custom_objects[-1] is not self.host.record:
            raise UsageError(
                "an object was registered for checkpointing after megaresume.attach",
                found=type(self.host.accelerator._custom_objects[-1]).__qualname__,
                expected="register_for_checkpointing before megaresume.attach",
                cause="Accelerate knows such objects by their number",
                action="call megaresume.attach after the last register_for_checkpointing",
            )

    def _prepare(self, prepare: Callable[..., Any], *objects: Any, **more: Any) -> Any:
        self._check_other(objects, "accelerator.prepare")
        return prepare(*objects, **more)

    def _skip(self, skip: Callable[..., Any], dataloader: Any, *args: Any, **more: Any) -> Any:
        self._check_other((dataloader,), "accelerator.skip_first_batches")
        return skip(dataloader, *args, **more)

    def _check_other(self, objects: Any, function: str) -> None:
        loader = self.steps.feed.loader
        if any(one is self or one is loader for one in objects):
            raise UsageError(
                f"{function} is not for this loader",
                found=f"{function} of what megaresume.attach was given, or returned",
                expected="the loader as it is: it gives each rank its own batches, on the device of the accelerator, "
                "and goes on after accelerator.load_state() by itself",
                action="leave it out: for batch in loop",
            )


def _check_name(directory: Path, step: int) -> None:
    """Refuse to write among the files of a checkpoint of another step. On rank 0."""
    try:
        records = [parse_record_name(name) for name in os.listdir(records_dir(directory.parent))]
    except FileNotFoundError:
        return
    taken = [r.iteration for r in records if r and r.kind == "manifest" and r.tag == directory.name]
    if any(other != step for other in taken):
        raise UsageError(
            "a checkpoint of another step has this name",
            found=f"save_state to {directory}, which holds step {max(taken)}, at step {step}",
            expected="a name of its own for each checkpoint",
            cause="it would be overwritten in place: a kill in the middle leaves neither",
            action="save_state() with automatic_checkpoint_naming; or a path with the number of the step in it",
        )
