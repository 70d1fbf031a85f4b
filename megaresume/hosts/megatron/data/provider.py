"""Our ``train_valid_test_datasets_provider``: datasets over streams that are open already.

Megatron calls it on every rank, once for every virtual-pipeline chunk, inside its own
``build_train_valid_test_data_loaders``. With ``--dataloader-type single`` it gets map-style datasets, and Megatron's
sampler with ``consumed_train_samples`` does the rest; with ``external`` it gets iterators, which nobody else positions.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils.data

from megaresume.batches.dataset import whole
from megaresume.batches.workers import outlive_signals
from megaresume.data.split import PARTS, Part
from megaresume.hosts.megatron.data.form import SampleForm
from megaresume.hosts.megatron.data.order import StreamOrder
from megaresume.hosts.megatron.data.samples import Item, RankDeal, SampleDataset
from megaresume.hosts.megatron.project import Project
from megaresume.stream.batches import Balance
from megaresume.stream.stream import Stream


def stream_provider(
    project: Project, args: Any, order: StreamOrder, form: SampleForm, base: Callable[..., Any] | None
) -> Callable[..., tuple[Any, Any, Any]]:
    """A provider over the streams of ``order``.

    Args:
        project: which Megatron this is.
        args: its arguments, after a checkpoint was loaded.
        order: holds the streams.
        form: what an item holds.
        base: the script's own provider, which knows on which ranks data is wanted (``is_dataset_built_on_rank``
            beside it); None: on tensor-parallel rank 0.
    """
    stage = base.keywords.get("vp_stage") if isinstance(base, functools.partial) else None

    def provide(train_val_test_num_samples: Sequence[int | None], vp_stage: int | None = stage) -> tuple[Any, Any, Any]:
        if not _is_wanted(project, base, vp_stage, packed=form.cu_seqlens is not None):
            return None, None, None
        streams = (order.streams.train, order.streams.valid, order.streams.test)
        parts = zip(PARTS, streams, train_val_test_num_samples, strict=True)
        train, valid, test = (
            _dataset(project, args, form, part, stream, wanted, order.balance if part == "train" else None)
            for part, stream, wanted in parts
        )
        return train, valid, test

    if base is not None:
        functools.update_wrapper(provide, base)
    provide.is_distributed = True  # type: ignore[attr-defined]
    return provide


def _dataset(
    project: Project,
    args: Any,
    form: SampleForm,
    part: Part,
    stream: Stream | None,
    wanted: int | None,
    balance: Balance | None,
) -> SampleDataset | MicroBatches | None:
    if stream is None or not wanted:
        return None
    if part != "train":
        form = replace(form, logged=False)
    consumed, first = _consumed(args, part)
    # Megatron counts what a whole run of these flags takes. A run that took more so far (larger global batches, more
    # evaluations) needs as much again at most; its sampler would find no samples left, and the stream has no end.
    num_samples = consumed + wanted
    if stream.schedule is not None:  # from 0.18 on, a run of --train-samples ends with a whole step
        num_samples = stream.schedule.step_of(first + num_samples - 1)[1] - first
    rank, size = data_parallel(project)
    deal = None
    if balance is not None:
        deal = RankDeal(balance, micro_batch_size=args.micro_batch_size, dp_rank=rank, dp_size=size)
    dataset = SampleDataset(
        stream, form, num_samples=num_samples, first=first, index_split=_index_split(project, part), deal=deal
    )
    if args.dataloader_type != "external":
        return dataset
    micro = args.micro_batch_size
    if part != "train":
        micro = getattr(args, "eval_micro_batch_size", None) or micro
    return MicroBatches(
        dataset,
        start=consumed,
        micro_batch_size=micro,
        dp_rank=rank,
        dp_size=size,
        num_workers=args.num_workers,
    )


def _consumed(args: Any, part: Part) -> tuple[int, int]:
    """Samples of this part that are consumed, as Megatron's sampler counts them, and the number of its sample 0."""
    if part == "test":
        return 0, 0
    consumed = int(getattr(args, f"consumed_{part}_samples", 0) or 0)
    if part == "valid" or not getattr(args, "phase_transition_iterations", None):
        return consumed, 0
    # Megatron counts from the start of the phase; the stream knows no phases.
    last = max(iteration for iteration in (0, *args.phase_transition_iterations) if iteration <= args.iteration)
    in_phase = (args.iteration - last) * args.global_batch_size
    return in_phase, consumed - in_phase


class MicroBatches:
    """The micro-batches of one data-parallel rank from a position on, for ``--dataloader-type external``.

    ``iter()`` is the object itself and changes nothing; there is no ``len()``. Slices are those of Megatron's sampler:
    micro-batch k from sample c on is ``c + k*D*m + r*m .. + m``, whatever the global batch sizes are, since those are
    multiples of D*m.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        start: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        num_workers: int = 0,
    ) -> None:
        self.dataset = dataset
        self.start = start
        self.micro_batch_size = micro_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.num_workers = num_workers
        self._batches: Iterator[dict[str, torch.Tensor]] | None = None

    def __iter__(self) -> MicroBatches:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """The next micro-batch: with images a `Batch`, or else what torch's default collation makes of the items.

        Raises:
            StopIteration: the samples of the run are used up.
        """
        if self._batches is None:  # not before it is needed: worker processes cost
            self._batches = iter(self._loader())
        return next(self._batches)

    def _slices(self) -> Iterator[list[int]]:
        """Lists of item numbers."""
        stride = self.micro_batch_size * self.dp_size
        for sample in range(self.start, len(self.dataset) - stride + 1, stride):
            first = sample + self.dp_rank * self.micro_batch_size
            yield list(range(first, first + self.micro_batch_size))

    def _loader(self) -> torch.utils.data.DataLoader[Item]:
        return torch.utils.data.DataLoader(
            self.dataset,
            batch_sampler=self._slices(),
            num_workers=self.num_workers,
            collate_fn=whole if self.dataset.form.images else None,
            worker_init_fn=outlive_signals,
            pin_memory=torch.cuda.is_available(),
            # It draws the workers' seeds. From the global generator, they would change the dropout of the model.
            generator=torch.Generator(),
        )


def _is_wanted(project: Project, base: Callable[..., Any] | None, vp_stage: int | None, *, packed: bool) -> bool:
    """Whether this rank's ``get_batch`` asks for batches."""
    if project.kind != "megatron-lm":
        return True  # Megatron-DeepSpeed calls the provider where data is wanted
    function = _beside(base, "is_dataset_built_on_rank")
    if function is None:
        return bool(parallel_state(project).get_tensor_model_parallel_rank() == 0)
    # () to 0.14, (vp_stage) to 0.16, (vp_stage, is_packed_sequence) from 0.17 on.
    parameters = inspect.signature(function).parameters
    given = {"vp_stage": vp_stage, "is_packed_sequence": packed}
    return bool(function(**{name: value for name, value in given.items() if name in parameters}))


def _beside(base: Callable[..., Any] | None, name: str) -> Callable[..., Any] | None:
    """A function of the script that the provider is from."""
    function: Any = base
    while function is not None:
        if isinstance(function, functools.partial):
            function = function.func
            continue
        names = getattr(getattr(function, "__func__", function), "__globals__", None)
        if names is None:
            names = getattr(type(function).__call__, "__globals__", {})
        if callable(names.get(name)):
            found: Callable[..., Any] = names[name]
            return found
        function = getattr(function, "__wrapped__", None)
    return None


def _index_split(project: Project, part: Part) -> Any:
    """Megatron's name of the part, by which it chooses batch sizes for evaluation; None if it has none."""
    module = project.modules.get("builder", "").rpartition(".")[0]
    try:
        splits = importlib.import_module(f"{module}.utils").Split if module else None
    except (ImportError, AttributeError):
        return None
    return getattr(splits, part, None)


def parallel_state(project: Project) -> Any:
    """Megatron's module of ranks."""
    return importlib.import_module(project.modules["parallel_state"])


def data_parallel(project: Project) -> tuple[int, int]:
    """Data-parallel rank and size, as Megatron's samplers see them (context-parallel ranks share one)."""
    mpu = parallel_state(project)
    return mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()


def coordinates(project: Project) -> str:
    """Where this process stands, for messages: ``tp 0, pp 1, dp 3, cp 0``."""
    mpu = parallel_state(project)
    names = {"tp": "tensor_model_parallel", "pp": "pipeline_model_parallel", "dp": "data_parallel"}
    names["cp"] = "context_parallel"
    ranks = {short: getattr(mpu, f"get_{long}_rank", None) for short, long in names.items()}
    return ", ".join(f"{short} {rank()}" for short, rank in ranks.items() if rank is not None)


def end_of_document(project: Project) -> int:
    """The tokenizer's end-of-document token."""
    return int(importlib.import_module(project.modules["global_vars"]).get_tokenizer().eod)
