"""Exact data resume for a training loop with Hugging Face's Accelerate.

    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    loop = megaresume.attach(accelerator, loader)
    accelerator.load_state()
    for batch in loop:
        with accelerator.accumulate(model):
            ...
            optimizer.step()
        if loop.step % 100 == 0: accelerator.save_state()
    loop.finish()

Hooked on the instances:

    optimizer.step           marks a step wherever gradients are synchronized; under DeepSpeed, engine.step, which
                             accelerator.backward calls
    accelerator.save_state   saved by the session: commit, lock, ledger, retention
    accelerator.load_state   loads the newest complete checkpoint, or the one that is asked for
    accelerator.backward, clip_grad_norm_    the loss and gradient norm of each step, for figures
    accelerator.prepare, skip_first_batches   refused for this loader: it is prepared, and resumes by itself

See docs/accelerate.md.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.batches.loader import StreamLoader
from megaresume.checkpoint.host import Restored, Resume
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.meetings import all_come, meeting_group
from megaresume.checkpoint.ranks import is_rank_0, on_all_ranks, on_rank_0
from megaresume.checkpoint.records.names import hugging_face_tag, parse_record_name, records_dir
from megaresume.checkpoint.saver import Save
from megaresume.checkpoint.settings import Checkpoints
from megaresume.checkpoint.stopping import StopConditions
from megaresume.checkpoint.system import Topology
from megaresume.hosts.accelerate_backends import (
    Written,
    backend_of,
    check_backend,
    check_loadable,
    engine_of,
    expected_files,
    zero_stage,
)
from megaresume.hosts.attach import check_new, refuse, replaced
from megaresume.hosts.deepspeed.engine import forget_gradients, raising_last, saved_names
from megaresume.hosts.feeds import Feed, feed_of
from megaresume.hosts.frozen import AS_THEN, GO_ON, FrozenWeights, entries, has_tensors, weights_of
from megaresume.hosts.loop import StepLoop
from megaresume.hosts.replicas import hashes_of_states, warn_of_differing
from megaresume.hosts.steps import loop_words
from megaresume.hosts.trainer import Hook, TrainerHost, check_checkpoints, check_together, write_all
from megaresume.hosts.unsaved import Beginning, check_all, check_schedulers
from megaresume.stream.errors import UsageError

#: See `check_loadable`.
WRITTEN: Written = {
    "DeepSpeed": (("pytorch_model/*",), "DeepSpeed: Accelerator(deepspeed_plugin=...), or accelerate launch"),
    "FSDP": (("pytorch_model_fsdp*",), "FSDP: Accelerator(fsdp_plugin=...), or accelerate launch"),
    # Not told from the weights, which a hook of the program may write elsewhere (as diffusers' examples do).
    "DDP": (("optimizer.bin", "optimizer_[0-9]*.bin"), "neither DeepSpeed nor FSDP"),
}


def attach(
    accelerator: Any,
    data: DataLoader | StreamLoader,
    *,
    checkpoints: Checkpoints = Checkpoints(),
    stop: StopConditions | None = None,
    metrics: Any = None,
) -> AcceleratedLoop:
    """Give a loop with Accelerate its data in an exact order, and add the state of that data to its checkpoints. Call
    it on every rank, after ``accelerator.prepare`` and ``register_for_checkpointing``, and before ``load_state``.

    Args:
        accelerator: Accelerate's.
        data: a `DataLoader` or a `StreamLoader`, not prepared.
        checkpoints: where the run saves, what it keeps, and so on. ``save_dir`` and ``keep_last`` may be left to
            ``ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=...)``.
        stop: when to save and exit, with `megaresume.Stopped`.
        metrics: live figures, and their sinks: see docs/metrics.md. None: no figures.

    Returns:
        what the loop iterates over.

    Raises, on every rank:
        UsageError: nothing is prepared, or a setting (named in the error) would change the data.
        CheckpointError: another job writes to the directory.
    """
    host = AcceleratorHost(accelerator, data)
    host.attach(checkpoints, stop, metrics)
    return host.loop


class DataRecord:
    """The data's record in a checkpoint of Accelerate's: the last object registered for checkpointing."""

    def __init__(self) -> None:
        self.carried: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Data state, optimizer steps and samples."""
        return self.carried

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what `state_dict` returned."""
        self.carried = state


_SCHEDULER = (
    "scheduler = accelerator.prepare(scheduler), or accelerator.register_for_checkpointing(scheduler), before "
    "megaresume.attach"
)
#: weights that a hook saves are compared as well, see `FrozenWeights.note`.
_IN_HOOKS = "or, if a hook of yours saves them, let it keep their dtype"
_INNER = "accelerator.register_for_checkpointing(optimizer.base_optimizer), of the optimizer as it was before prepare"


class AcceleratorHost(TrainerHost):
    """See `TrainerHost`.

    Args:
        trainer: Accelerate's ``Accelerator``, with models and optimizers prepared.
        data: the loader, not prepared.
    """

    package = "accelerate"
    words = loop_words(
        clock="optimizer.step()",
        early_save=(
            "the loop saves before the optimizer step, or after every micro-batch of an accumulation; or steps are "
            "made by another optimizer than the one that was prepared",
            "save after optimizer.step() of what was returned by accelerator.prepare, and end a step with its last "
            "micro-batch",
        ),
    )
    forgotten = "accelerator.load_state() was not called"
    load = "accelerator.load_state() before the first step"
    _beginning: Beginning | None = None
    frozen: FrozenWeights
    begin_anew = "load its weights with safetensors.torch.load_model, and save to another directory"
    loop: AcceleratedLoop

    def __init__(self, trainer: Any, data: DataLoader | StreamLoader) -> None:
        super().__init__(trainer)
        self.data, self.record = data, DataRecord()
        self.frozen = FrozenWeights(lambda: weights_of(self._modules), f"{AS_THEN}; {_IN_HOOKS}; or, {GO_ON}")

    def feed(self) -> Feed:
        """See `TrainerHost`."""
        return feed_of(self.data)

    def check(self) -> None:
        """See `TrainerHost`."""
        accelerator, loader = self.trainer, feed_of(self.data).loader
        check_new(accelerator, "Accelerator")
        if not accelerator._optimizers:
            raise UsageError(
                "nothing is prepared yet",
                found="no optimizer of this Accelerator",
                expected="model and optimizer = accelerator.prepare(model, optimizer), and megaresume.attach after it",
                action="call megaresume.attach after the last accelerator.prepare",
            )
        accumulation = getattr(loader, "accumulation", accelerator.gradient_accumulation_steps)
        ranks = f"rank {accelerator.process_index} of {accelerator.num_processes}"
        own = f"rank {loader.dp_rank} of {loader.dp_size}"
        kind = str(accelerator.distributed_type).removeprefix("DistributedType.")
        leave = "leave it out"
        refused = {
            "split_batches": (accelerator.split_batches, f"{leave}, and divide the batch size by the number of ranks"),
            "dispatch_batches": (accelerator.dispatch_batches, f"{leave}: every rank reads its own items"),
            "sync_with_dataloader=False": (
                not accelerator.gradient_state.sync_with_dataloader,
                f"{leave}: a step ends with its last micro-batch",
            ),
            "a loader of other ranks": (
                own != ranks and f"{own}; the Accelerator's is {ranks}",
                "leave dp_rank and dp_size out, and make the loader after the Accelerator; without a GPU, "
                "set ACCELERATE_USE_CPU=1",
            ),
            "gradient_accumulation_steps other than the loader's": (
                accumulation != accelerator.gradient_accumulation_steps
                and f"{accelerator.gradient_accumulation_steps}, and accumulation={accumulation}",
                "give DataLoader(accumulation=...) and Accelerator(gradient_accumulation_steps=...) the same number",
            ),
            "this way of training on several devices": (
                kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED") and kind,
                "train with DDP, FSDP2 or DeepSpeed",
            ),
            "several models under DeepSpeed": (
                kind == "DEEPSPEED" and len(accelerator._models) > 1 and f"{len(accelerator._models)} engines",
                "one engine that trains; what does not train need not be prepared",
            ),
            "tensor, context or sequence parallelism": (
                getattr(accelerator.parallelism_config, "non_data_parallel_size", 1) > 1,
                "train with DDP, FSDP2 or DeepSpeed: these ranks need the same batches, and each would get its own",
            ),
        }
        refuse(refused)
        check_backend(accelerator)
        self._warn_of_schedules(loader)

    def _warn_of_schedules(self, loader: Any) -> None:
        """See `warn_of_length`."""
        if not isinstance(loader, DataLoader):
            return
        epochs = [source.max_epochs for source in loader.stream.config.sources]
        if epochs[0] is None or epochs != [epochs[0]] * len(epochs):
            return
        steps = epochs[0] * len(loader) // loader.accumulation
        for one in self.trainer._schedulers:
            if one.step_with_optimizer and not one.split_batches:
                warn_of_length(one.scheduler, steps, self.trainer.num_processes)

    def check_first_save(self) -> None:
        """See `TrainerHost`."""
        kept = [*self.kept(), self.trainer.scaler]  # Accelerate saves the scaler by itself
        writers = [*self.trainer._save_model_state_pre_hook.values()]
        on_all_ranks(
            lambda: check_all(
                self.trainer._models,
                self._optimizers,
                kept,
                self._beginning,
                scheduler=_SCHEDULER,
                inner=_INNER,
                writers=writers,
            )
        )
        registered = [one for one in self.trainer._custom_objects if one is not self.record]
        named = {f"{type(one).__qualname__} ({k})": one for k, one in enumerate(registered)}
        warn_of_differing(hashes_of_states(named))

    def check_schedulers(self) -> None:
        """See the function of this name."""
        check_schedulers(self._optimizers, self.kept(), _SCHEDULER)
        self._beginning = self._beginning or Beginning(self.trainer._models, self.kept())

    @property
    def _modules(self) -> dict[str, Any]:
        return {str(number): one for number, one in enumerate(self.trainer._models)}

    def _note_frozen(self, save: Save, *, excludes: bool) -> None:
        """See `FrozenWeights.note`."""
        if backend_of(self.trainer) == "DDP" and self.trainer._save_model_state_pre_hook:
            # Those of a program usually take all weights out of what is saved, and write some of them themselves.
            self.frozen.note(save, lambda _: (), may_be_elsewhere=lambda: True)
            return

        def saved(weights: Mapping[str, Any]) -> Iterable[str]:
            if (engine := engine_of(self.trainer)) is not None:
                return saved_names(engine, weights, excludes=excludes)
            return entries({name: one.state_dict() for name, one in self._modules.items()})

        others = [one for one in self.trainer._custom_objects if one is not self.record]
        self.frozen.note(save, saved, self._optimizers, may_be_elsewhere=lambda: has_tensors(others))

    @property
    def _optimizers(self) -> list[Any]:
        return [optimizer for one in self.trainer._optimizers for optimizer in (one, one.optimizer)]

    def kept(self) -> Sequence[Any]:
        """See `TrainerHost`."""
        accelerator = self.trainer
        return [*(one.scheduler for one in accelerator._schedulers), *accelerator._custom_objects]

    def check_processes(self) -> None:
        """See `TrainerHost`."""
        check_together(
            self.trainer.num_processes,
            "Accelerator.num_processes",
            cause="no GPU is visible, and Accelerate was not told to use the CPU",
            action="Accelerator(cpu=True), or ACCELERATE_USE_CPU=1; on a GPU machine check nvidia-smi",
        )

    def settings(self, given: Checkpoints) -> Checkpoints:
        """The settings, completed from Accelerate's own for directory and retention."""
        naming = self.trainer.project_configuration
        if naming.automatic_checkpoint_naming:
            if given.save_dir is None and naming.project_dir is not None:
                given = replace(given, save_dir=Path(naming.project_dir) / "checkpoints")
            if given.keep_last is None and naming.total_limit is not None:
                given = replace(given, keep_last=naming.total_limit)
        action = "ProjectConfiguration(project_dir, automatic_checkpoint_naming=True), or Checkpoints(save_dir=...)"
        return check_checkpoints(given, "Accelerate", action)

    def begin(self) -> None:
        """See `TrainerHost`."""
        self.loop, self.meeting = AcceleratedLoop(self), meeting_group()
        self.trainer.register_for_checkpointing(self.record)
        # The inner ones: a step made with them directly would not be counted.
        self.watch(optimizer.optimizer for optimizer in self.trainer._optimizers)

    def hooks(self) -> list[Hook]:
        """See `TrainerHost`."""
        return self.loop.hooks()

    def save_now(self) -> None:
        """Save as ``accelerator.save_state()`` does."""
        self.trainer.save_state()

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """See `HasLoggers`."""
        self.trainer.log(dict(figures), step=step)

    def topology(self) -> Topology:
        """See `Host`."""
        return replace(super().topology(), zero_stage=zero_stage(self.trainer))

    def expected_files(self, save_dir: Path, tag: str) -> Sequence[str] | None:
        """See `Host`."""
        return expected_files(self.trainer, save_dir, tag, inner=lambda _: "pytorch_model")

    def write(self, save: Save, write: Callable[[str], Any], *, excludes: bool) -> Any:
        """Write a checkpoint with Accelerate's own method ``write(directory)``.

        ``excludes``: whether DeepSpeed is told to leave out frozen parameters.
        """
        self._note_frozen(save, excludes=excludes)
        self.record.carried = self.carried(save)

        def write_files() -> Any:
            with raising_last(engine_of(self.trainer)), replaced(self, is_at_files=True):
                return write(str(save.tag_dir))

        # Accelerate deletes old checkpoints before the new one is complete, and fails on the records beside them.
        with replaced(self.trainer.project_configuration, automatic_checkpoint_naming=False):
            return write_all(save, write_files)

    def read(self, choice: Choice, before: Topology | None, read: Callable[[str], Any]) -> Restored:
        """Read a checkpoint with Accelerate's own method ``read(directory)``.

        Args:
            choice: the checkpoint.
            before: how the run was laid out when it saved; None if unknown.
        """

        def check_and_read() -> None:
            check_loadable(self.trainer, choice.tag_dir, before, written=WRITTEN, begin_anew=self.begin_anew)
            with replaced(self, is_at_files=True):
                read(str(choice.tag_dir))

        on_all_ranks(check_and_read)
        self._forget_gradients()
        # If a ``for`` was left in mid-step, the next save stored how far it was; that step begins again.
        self.trainer.step = 0
        return self.resumed(self.record.carried)

    def _forget_gradients(self) -> None:
        """Drop the gradients of an abandoned step."""
        if (engine := engine_of(self.trainer)) is not None:
            forget_gradients(engine)
            return
        for optimizer in self.trainer._optimizers:
            optimizer.optimizer.zero_grad()


class AcceleratedLoop(StepLoop):
    """The micro-batches of a training loop, on the accelerator's device; made by `megaresume.attach`.

    Iterating ends with an epoch of a `DataLoader`, or with the data of a `StreamLoader`.
    """

    #: What Accelerate expects of a loader in use: nothing was added to fill up batches.
    remainder = -1

    def __init__(self, host: AcceleratorHost) -> None:
        super().__init__(host)
        self.host = host
        self._optimizers = list(host.trainer._optimizers)
        #: The optimizers that made the last step.
        self._made: list[Any] = []

    def hooks(self) -> list[Hook]:
        """See `TrainerHost`."""
        accelerator, engine = self.host.trainer, engine_of(self.host.trainer)
        owners = self._optimizers if engine is None else [engine]
        return [
            *((owner, "step", functools.partial(self._step, owner)) for owner in owners),
            (accelerator, "save_state", self._save_state),
            (accelerator, "load_state", self._load_state),
            (accelerator, "backward", self._backward),
            (accelerator, "clip_grad_norm_", self._clip),
            (accelerator, "prepare", self._prepare),
            (accelerator, "skip_first_batches", self._skip),
        ]

    @property
    def end_of_dataloader(self) -> bool:
        """For `Accelerator.accumulate`: whether the last micro-batch handed out ends its step."""
        return self.steps.is_whole

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches of this rank: see `Steps`."""
        from accelerate.utils import send_to_device

        accelerator = self.host.trainer
        self.host.check_schedulers()
        accelerator.gradient_state._add_dataloader(self)
        try:
            for batch in self.steps:
                yield send_to_device(batch, accelerator.device) if accelerator.device_placement else batch
        finally:
            accelerator.gradient_state._remove_dataloader(self)

    # The hooks

    def _backward(self, backward: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        self.host.note_loss(loss)
        return backward(loss, *args, **kwargs)

    def _clip(self, clip: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        norm = clip(*args, **kwargs)
        self.host.note_norm(norm)
        return norm

    def _step(self, optimizer: Any, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        # Under FSDP, torch creates an optimizer's state by a step without gradients, before it saves or loads it.
        if self.host.trainer.sync_gradients and not self.host.is_at_files:
            # Another optimizer in the same step does not make another step.
            if not self.steps.is_idle or any(optimizer is one for one in self._made) or not self._made:
                self.steps.stepped()
                self._made = []
            self._made.append(optimizer)
        return result

    def save(self) -> None:
        """Save as ``accelerator.save_state()`` does."""
        self.host.save_now()

    def _save_state(self, write: Callable[..., Any], output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        def check() -> Path:
            self._check_prepared()
            return self._place(output_dir)

        all_come("accelerator.save_state()", self.host.meeting)
        if self.session.passes_over_saves():
            return None
        directory = on_all_ranks(check)
        on_rank_0(lambda: _check_name(directory, self.step))
        return self.host.save_by(
            directory.parent,
            lambda save: self.host.write(
                save,
                lambda path: write(path, *args, **kwargs),
                excludes=kwargs.get("exclude_frozen_parameters", False),
            ),
            tag=directory.name,
            tracker=False,
        )

    def _place(self, output_dir: Any) -> Path:
        """The tag directory for a save."""
        root = self.host.save_dir
        if output_dir is None or self.host.trainer.project_configuration.automatic_checkpoint_naming:
            return root / hugging_face_tag(self.step)
        directory = Path(os.path.abspath(os.path.expanduser(output_dir)))
        if directory.parent != root:
            raise UsageError(
                "all checkpoints of a run must be in one directory",
                found=f"save_state({os.fspath(output_dir)!r})",
                expected=f"a directory in {root}",
                action="save_state() without a path; or Checkpoints(save_dir=...) with the directory that they are in",
            )
        return directory

    def _load_state(self, read: Callable[..., Any], input_dir: Any = None, *args: Any, **kwargs: Any) -> Resume | None:
        on_all_ranks(self._check_prepared)
        asked = None if input_dir is None else Path(os.path.abspath(os.path.expanduser(input_dir)))

        def read_files(choice: Choice, before: Topology | None) -> Restored:
            return self.host.read(choice, before, lambda path: read(path, *args, **kwargs))

        self.host.load_by(read_files, asked)
        return self.session.resumed

    def _check_prepared(self) -> None:
        found = self.host.trainer._optimizers
        if len(found) != len(self._optimizers) or any(a is not b for a, b in zip(found, self._optimizers, strict=True)):
            raise UsageError(
                "optimizers were prepared or removed after megaresume.attach",
                found=f"{len(found)} optimizers",
                expected=f"the {len(self._optimizers)} that were prepared before",
                action="call megaresume.attach after the last accelerator.prepare",
            )
        if self.host.trainer._custom_objects[-1] is not self.host.record:
            raise UsageError(
                "an object was registered for checkpointing after megaresume.attach",
                found=type(self.host.trainer._custom_objects[-1]).__qualname__,
                expected="register_for_checkpointing before megaresume.attach",
                cause="Accelerate knows such objects by their number",
                action="call megaresume.attach after the last register_for_checkpointing",
            )

    def _prepare(self, prepare: Callable[..., Any], *objects: Any, **kwargs: Any) -> Any:
        self._check_other(objects, "accelerator.prepare")
        return prepare(*objects, **kwargs)

    def _skip(self, skip: Callable[..., Any], dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        if dataloader is self and self.steps.is_resumed and self.steps.is_idle:
            return self  # what was trained before the resume is not read again
        self._check_other((dataloader,), "accelerator.skip_first_batches")
        return skip(dataloader, *args, **kwargs)

    def _check_other(self, objects: Any, function: str) -> None:
        loader = self.steps.feed.loader
        if any(one is self or one is loader for one in objects):
            raise UsageError(
                f"{function} is not for this loader",
                found=f"{function} of what megaresume.attach was given, or returned",
                expected="the loader as it is: it gives each rank its own batches, on the device of the accelerator, "
                "and resumes after accelerator.load_state() by itself",
                action="leave it out: for batch in loop",
            )


def _check_name(directory: Path, step: int) -> None:
    """Refuse to write into the checkpoint of another step. On rank 0."""
    try:
        records = [parse_record_name(name) for name in os.listdir(records_dir(directory.parent))]
    except FileNotFoundError:
        return
    taken = [r.iteration for r in records if r and r.kind == "manifest" and r.tag == directory.name]
    if any(other != step for other in taken):
        raise UsageError(
            "a checkpoint of another step has this name",
            found=f"save_state to {directory}, which holds step {max(taken)}, at step {step}",
            expected="a different name for each checkpoint",
            cause="it would be overwritten in place: a kill in the middle leaves neither",
            action="save_state() with automatic_checkpoint_naming; or a path with the number of the step in it",
        )


def warn_of_length(scheduler: Any, steps: int, times: int) -> None:
    """Warn of a schedule that would end long before the run.

    Args:
        scheduler: torch's.
        steps: steps of the run as a program counts them: epochs times the steps per epoch.
        times: how often the scheduler is stepped per step.
    """
    plans = [getattr(one, "keywords", {}).get("num_training_steps") for one in getattr(scheduler, "lr_lambdas", ())]
    length = next((plan for plan in [*plans, getattr(scheduler, "total_steps", None)] if plan is not None), None)
    if times > 1 and length == steps and is_rank_0():
        print(
            f"megaresume: WARNING: {type(scheduler).__name__} is planned for {length} steps, as many as the run has. "
            "Accelerate steps a prepared scheduler once for each rank in each of them, so it would be over after "
            f"{length // times}. len(loader) is that of one rank, before prepare as well. Multiply the number of steps "
            "by accelerator.num_processes",
            flush=True,
        )
