"""TRL's asynchronous GRPO: each prompt trained exactly once, however rollouts end and whenever the run is killed.

    trainer = AsyncGRPOTrainer(...)
    megaresume.attach(trainer)
    trainer.train(resume_from_checkpoint=...)

TRL's worker reads the dataset in a separate process, from the lowest prompt that is not trained; a group that was
dropped as stale blocks that forever, so that a resume repeats what came after it (TRL#7274). With this host, the
training process issues the prompts, one at a time when the worker asks for them, and keeps account of each rollout
until a step has trained it:

    worker's process     `IssuedRows`, instead of the dataset: asks for the next prompt over a socket
                         `ExactLoop`: its loop, whose samples have ordinal, ticket, rollout, and rows of that rollout
    main process         rollout_queue.get: is the sample wanted? if not, it is dropped, or requeued if stale
                         the collator: which rollouts are in a micro-batch
                         training_step, then on_step_end: they are trained
                         _save_checkpoint: ``prompts.json``, in the checkpoint's directory, before TRL writes there
                         train: True means the newest complete checkpoint
                         _inner_training_loop: the state of the checkpoint that TRL loads
                         `RenamedWeights`: those of its weights that the Trainer does not find

TRL generates whole groups: if a group was partly trained, the rollouts that are already trained are not used again. See
docs/rl.md.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample, _AsyncRolloutLoop

from megaresume.checkpoint.records.prompt_ledger import PROMPTS, STATE
from megaresume.hosts.attach import SLOT, check_new, hook
from megaresume.hosts.hugging_face_data import check_processes
from megaresume.hosts.hugging_face_weights import FrozenInState, RenamedWeights
from megaresume.hosts.prompts import Prompts, write_state
from megaresume.stream.data_yaml import Append
from megaresume.stream.errors import StateError, UsageError
from megaresume.stream.in_flight import STALE, OnStale

log = logging.getLogger(__name__)

_OTHER = "load another checkpoint; or start from its weights as a new model"
#: key for the number of a micro-batch.
BATCH = "megaresume_batch"


# In the worker's process


class IssuedRows:
    """The dataset of a worker: its rows are (ordinal, ticket, row), from the training process.

    Args:
        address: of its socket.
        key: authenticates the connection.
    """

    def __init__(self, address: Any, key: bytes) -> None:
        self._address, self._key = address, key

    def __iter__(self) -> Iterator[Any]:
        with Client(self._address, authkey=self._key) as connection:
            while True:
                connection.send(None)
                yield connection.recv()

    def lost(self, ordinal: int, ticket: str, rollouts: list[int]) -> None:
        """Report rollouts that have no token to train."""
        with Client(self._address, authkey=self._key) as connection:
            connection.send((ordinal, ticket, rollouts))
            connection.recv()


@dataclass(slots=True)
class Sample(RolloutSample):
    """A row of a rollout, which knows its rollout."""

    ordinal: int = -1
    ticket: str = ""
    rollout: int = -1
    #: number of rows of its rollout.
    rows: int = 1


class ExactLoop(_AsyncRolloutLoop):
    """TRL's loop, with issued prompts as groups."""

    def _repeat_iterator(self) -> Iterator[tuple[int, dict[str, Any]]]:
        self._prompts: dict[int, tuple[int, str]] = {}
        for group, (ordinal, ticket, row) in enumerate(self._dataset_iter):
            self._prompts[group] = ordinal, ticket
            for _ in range(self.num_generations):
                yield group, row

    async def _score_group(self, group: Any) -> list[RolloutSample]:
        samples = await super()._score_group(group)
        ordinal, ticket = self._prompts.pop(group.group_id)
        rollouts = [k for k, sequences in enumerate(group.completions_sequences) for _ in sequences]
        rows = Counter(rollouts)
        if lost := [k for k in range(self.num_generations) if not rows[k]]:
            self.dataset.lost(ordinal, ticket, lost)
        return [
            Sample(
                **{field.name: getattr(sample, field.name) for field in fields(RolloutSample)},
                ordinal=ordinal,
                ticket=ticket,
                rollout=rollout,
                rows=rows[rollout],
            )
            for sample, rollout in zip(samples, rollouts, strict=True)
        ]


# In the training process


class GroupMember(int):
    """A prompt's ordinal, as the ``group_id`` of a sample, which TRL only compares; it knows its rollout."""

    rollout: int
    rows: int

    @classmethod
    def of(cls, sample: Sample) -> GroupMember:
        """The group member of a sample."""
        member = cls(sample.ordinal)
        member.rollout, member.rows = sample.rollout, sample.rows
        return member


class Arrivals:
    """The queue of samples to be trained, in place of TRL's.

    Args:
        trainer: TRL's.
        prompts: the account.
        requeues: whether a prompt is issued again if a rollout is stale.
    """

    def __init__(self, trainer: Any, prompts: Prompts, *, requeues: bool) -> None:
        self._trainer, self._prompts, self._queue = trainer, prompts, trainer.rollout_queue
        self._requeues = requeues
        #: for rollouts with only some rows received: whether they are wanted, and the number of rows still to come.
        self._begun: dict[tuple[int, int], tuple[bool, int]] = {}

    def qsize(self) -> int:
        """See `queue.Queue`."""
        return int(self._queue.qsize())

    def get(self, timeout: float) -> Any:
        """The next wanted sample. Raises queue.Empty: none came in this time."""
        while True:
            sample = self._queue.get(timeout=timeout)
            if self._is_wanted(sample):
                sample.group_id = GroupMember.of(sample)
                return sample

    def _is_wanted(self, sample: Sample) -> bool:
        place = sample.ordinal, sample.rollout
        wanted, left = self._begun.pop(place, (None, sample.rows))
        if wanted is None:
            prompts, version = self._prompts, int(sample.model_version)
            prompts.advance(max(self._trainer.model_version, version, prompts.version))
            wanted = prompts.done(sample.ordinal, sample.ticket, sample.rollout, version=version)
            wanted = wanted and self._is_fresh(sample)
        if left > 1:
            self._begun[place] = wanted, left - 1
        return wanted

    def _is_fresh(self, sample: Sample) -> bool:
        """Whether TRL would train it. TRL decides when a sample leaves the queue, and trains all that it accepts."""
        trainer = self._trainer
        if trainer.model_version - sample.model_version <= trainer.args.max_staleness:
            return True
        trainer._metrics["train"]["sample/dropped_stale_total"].append(1.0)
        self._prompts.drop(sample.ordinal, STALE, self._requeues, rollout=sample.rollout)
        return False


class TrainedRollouts(TrainerCallback):
    """Counts the rollouts that a step has trained.

    Args:
        trainer: TRL's.
        prompts: the account.
    """

    def __init__(self, trainer: Any, prompts: Prompts) -> None:
        self._prompts, self._number = prompts, 0
        #: micro-batches that were made; rollouts of the step; rows of a rollout that no step has trained yet.
        self._made: dict[int, list[GroupMember]] = {}
        self._step: list[GroupMember] = []
        self._rows: dict[tuple[int, int], int] = {}
        hook(trainer, "get_train_dataloader", self._loader)
        hook(trainer, "training_step", self._train)

    def _loader(self, make: Any) -> Any:
        loader = make()
        collator = getattr(loader, "collate_fn", None) or loader.base_dataloader.collate_fn
        hook(collator, "torch_call", self._collate)
        return loader

    def _collate(self, collate: Any, examples: Any) -> dict[str, Any]:
        batch: dict[str, Any] = collate(examples)
        (rows,) = examples
        self._number += 1
        self._made[self._number] = [sample["group_id"] for row in rows for sample in row.samples]
        batch[BATCH] = torch.full((len(rows),), self._number)
        return batch

    def _train(self, train: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        number = int(inputs.pop(BATCH)[0])
        result = train(model, inputs, *args, **kwargs)
        self._step += self._made.pop(number, ())  # none on ranks other than the main one
        return result

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer has stepped."""
        done = []
        for member in self._step:
            place = int(member), member.rollout
            self._rows[place] = self._rows.get(place, member.rows) - 1
            if not self._rows[place]:
                del self._rows[place]
                done.append(place)
        self._step.clear()
        self._prompts.trained(state.global_step, done)


class Issuer:
    """Answers the worker's `IssuedRows`, in threads.

    Args:
        prompts: the account.
    """

    def __init__(self, prompts: Prompts) -> None:
        self._prompts, self._key = prompts, secrets.token_bytes(32)
        self._listener = Listener(authkey=self._key)
        threading.Thread(target=self._accept, name="megaresume-prompts", daemon=True).start()

    @property
    def dataset(self) -> IssuedRows:
        """The dataset for the worker."""
        return IssuedRows(self._listener.address, self._key)

    def _accept(self) -> None:
        while True:
            connection = self._listener.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        with connection:
            while True:
                try:
                    asked = connection.recv()
                except (EOFError, OSError):
                    return
                if asked is None:
                    (prompt,) = self._prompts.issue(1)
                    connection.send((prompt.ordinal, prompt.ticket, prompt.content))
                else:
                    ordinal, ticket, rollouts = asked
                    for rollout in rollouts:
                        if self._prompts.done(ordinal, ticket, rollout):
                            self._prompts.drop(ordinal, "empty", rollout=rollout)
                    connection.send(None)


def attach(
    trainer: Any, *, append: Append | None = None, on_stale: OnStale = "requeue", ledger: str | Path | None = None
) -> Prompts | None:
    """Give TRL's asynchronous GRPO each prompt exactly once. On every rank, before ``trainer.train``. See
    `megaresume.attach`.

    Dataset, generations, staleness and seed (``data_seed``, or ``seed``) are TRL's, which also determines where and
    when it saves. ``num_train_epochs`` counts trained prompts.

    Args:
        trainer: an ``AsyncGRPOTrainer``.
        append: what a resume does if there are more prompts: see `megaresume.DataLoader`.
        on_stale: for a rollout older than ``max_staleness``: ``requeue`` its prompt, or ``drop`` it, as TRL does.
        ledger: see `megaresume.Prompts`; None: ``prompts.jsonl`` in ``output_dir``.

    Returns:
        the prompts; None on ranks other than the main one.

    Raises:
        UsageError: a worker other than TRL's own, a streaming dataset, an unknown ``on_stale``, processes that would
            each train separately, or already attached.
    """
    needed = ("rollout_worker", "rollout_queue", "_trained_groups", "_save_checkpoint", "_inner_training_loop")
    check_new(
        trainer,
        "trainer",
        missing=[name for name in needed if not hasattr(trainer, name)],
        headline="this is not an asynchronous GRPO trainer of TRL's",
        expected="an AsyncGRPOTrainer; that of TRL 1.16.0 was tried",
    )
    check_processes(trainer)
    hook(trainer, "train", functools.partial(_choose, trainer))  # on every rank, as all load the same one
    for owner, name, around in (*RenamedWeights(trainer).hooks(), *FrozenInState(trainer).hooks()):
        hook(owner, name, around)
    if not trainer.accelerator.is_main_process:
        hook(trainer, "training_step", _without_number)
        return None
    worker, dataset = trainer.rollout_worker, trainer.train_dataset
    if getattr(worker, "_loop_cls", None) is not _AsyncRolloutLoop:
        raise UsageError(
            "a rollout worker of your own cannot be used with megaresume.attach",
            found=f"rollout_worker={type(worker).__qualname__}",
            expected="TRL's AsyncRolloutWorker",
            action="call megaresume.Prompts in your worker: issue(), done(), trained()",
        )
    args = trainer.args
    prompts = Prompts(
        dataset,
        rollouts=args.num_generations,
        on_stale=on_stale,
        ledger=Path(args.output_dir, PROMPTS) if ledger is None else ledger,
        seed=args.seed if args.data_seed is None else args.data_seed,
        append=append,
    )
    trainer.rollout_queue = Arrivals(trainer, prompts, requeues=on_stale == "requeue")
    setattr(trainer, SLOT, prompts)
    issuer = Issuer(prompts)
    worker._loop_cls = ExactLoop
    worker._loop_kwargs["dataset"] = issuer.dataset
    trainer.add_callback(TrainedRollouts(trainer, prompts))
    hook(worker, "start", functools.partial(_start, trainer, prompts))
    hook(trainer, "_save_checkpoint", functools.partial(_save, trainer, prompts))
    hook(trainer, "_inner_training_loop", functools.partial(_train, trainer, prompts))
    return prompts


def _choose(trainer: Any, train: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
    if resume_from_checkpoint is True:
        resume_from_checkpoint = newest_whole(Path(trainer.args.output_dir)) or True
    return train(resume_from_checkpoint, *args, **kwargs)


def _start(trainer: Any, prompts: Prompts, start: Any) -> None:
    # TRL's own position is not used: prompts are counted here.
    trainer.rollout_worker._loop_kwargs["dataset_start_index"] = 0
    trainer._groups_before_resume = prompts.num_settled
    start()


def _save(trainer: Any, prompts: Prompts, save: Any, *args: Any, **kwargs: Any) -> None:
    directory = Path(trainer._get_output_dir(trial=None), f"checkpoint-{trainer.state.global_step}")
    write_state(prompts, directory, trainer.state.global_step)
    save(*args, **kwargs)


def _train(trainer: Any, prompts: Prompts, train: Any, *args: Any, **kwargs: Any) -> Any:
    if (found := kwargs.get("resume_from_checkpoint")) is not None:
        prompts.load_state_dict(_read(Path(os.fspath(found))))
        log.info("megaresume: %d prompts in flight are issued again", len(prompts.in_flight))
    else:
        # Here, so that a refusal is raised in the trainer, and not in the thread that serves a worker.
        prompts.begin(is_saved=any(Path(trainer.args.output_dir).glob("checkpoint-*/trainer_state.json")))
    return train(*args, **kwargs)


def newest_whole(output_dir: Path) -> str | None:
    """The newest complete checkpoint: the Trainer writes ``trainer_state.json`` last. None: there is none."""
    found = {int(path.name.rpartition("-")[2]): path for path in output_dir.glob("checkpoint-*[0-9]")}
    for step in sorted(found, reverse=True):
        try:
            _read(found[step])
        except (FileNotFoundError, ValueError, KeyError):  # from the Trainer's own file
            log.warning("megaresume: %s is incomplete, its save was killed: passed over", found[step].name)
        else:
            return str(found[step])
    return None


def _without_number(train: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    inputs.pop(BATCH, None)
    return train(model, inputs, *args, **kwargs)


def _read(directory: Path) -> Any:
    """The state in a checkpoint. Raises StateError: there is none, or it is of another step."""
    step = int(json.loads((directory / "trainer_state.json").read_bytes())["global_step"])
    try:
        found = json.loads((directory / STATE).read_bytes())
    except FileNotFoundError as error:
        raise StateError(
            "the checkpoint has no state of its prompts",
            found=f"no {STATE} in {directory}",
            expected="the file that was saved with the weights",
            cause="it was saved without megaresume, or the file was not copied along",
            action=_OTHER,
        ) from error
    except ValueError as error:
        raise StateError.unreadable(
            "the state of the prompts", error, "JSON", at=directory / STATE, action=_OTHER
        ) from error
    if not isinstance(found, dict) or found.get("step") != step:
        raise StateError(
            "weights and prompts are from different steps",
            found=f"weights of step {step}, {STATE} of step {found.get('step') if isinstance(found, dict) else None}",
            expected="the same step",
            cause="a file was copied from another checkpoint",
            action="load another checkpoint",
        )
    return found["prompts"]
