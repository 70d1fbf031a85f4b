"""Our ``train_valid_test_datasets_provider``: datasets over streams that are already open.

Megatron calls it on every rank, once per virtual-pipeline chunk, inside its own
``build_train_valid_test_data_loaders``. With ``--dataloader-type single`` it returns map-style datasets, and Megatron's
sampler does the rest from ``consumed_train_samples``; with ``external`` it returns positioned iterators.

`form_of` derives from Megatron's flags what an item must hold, and refuses flags under which it would be trained
wrongly.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.utils.data

from megaresume.batches.workers import outlive_signals, whole
from megaresume.data.split import PARTS, Part
from megaresume.hosts.megatron.project import Project, data_parallel, parallel_state
from megaresume.hosts.megatron.samples import IDENTITY_VARIABLE, Item, RankDeal, SampleDataset, SampleForm
from megaresume.hosts.megatron.streams import StreamOrder
from megaresume.stream.batches import Balance
from megaresume.stream.data_yaml import PackingConfig
from megaresume.stream.errors import UsageError
from megaresume.stream.stream import Stream


def stream_provider(
    project: Project, args: Any, order: StreamOrder, form: SampleForm, base: Callable[..., Any] | None
) -> Callable[..., tuple[Any, Any, Any]]:
    """A provider over the streams of ``order``.

    Args:
        project: which Megatron this is.
        args: its arguments, once a checkpoint was loaded.
        order: has the streams.
        form: what an item holds.
        base: the script's own provider, which knows on which ranks data is needed (``is_dataset_built_on_rank`` next to
            it); None: on tensor-parallel rank 0.
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
    # Megatron counts the samples of a whole run with these flags. A run that has already taken more (larger global
    # batches, more evaluations) needs at most as many again, but its sampler would find none left. Streams are endless.
    num_samples = consumed + wanted
    if stream.schedule is not None:  # since 0.18, a run of --train-samples ends with a whole step
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
    """(consumed samples of this part, as Megatron's sampler counts them; the number in the stream of its sample 0)."""
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

    ``iter()`` returns the object itself and changes nothing; there is no ``len()``. Slices are those of Megatron's
    sampler: micro-batch k from sample c on is ``c + k*D*m + r*m .. + m``, for any global batch sizes, as they are
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
        """The next micro-batch: a `Batch` if there are images, else torch's default collation of the items.

        Raises:
            StopIteration: the samples of the run are used up.
        """
        if self._batches is None:  # only when needed, as worker processes are costly
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
            # The loader draws the workers' seeds; from the global generator, that would change the model's dropout.
            generator=torch.Generator(),
        )


def _is_wanted(project: Project, base: Callable[..., Any] | None, vp_stage: int | None, *, packed: bool) -> bool:
    """Whether this rank's ``get_batch`` asks for batches."""
    if project.kind != "megatron-lm":
        return True  # Megatron-DeepSpeed calls the provider only where data is needed
    function = _beside(base, "is_dataset_built_on_rank")
    if function is None:
        return bool(parallel_state(project).get_tensor_model_parallel_rank() == 0)
    # () up to 0.14, (vp_stage) up to 0.16, (vp_stage, is_packed_sequence) since 0.17.
    parameters = inspect.signature(function).parameters
    given = {"vp_stage": vp_stage, "is_packed_sequence": packed}
    return bool(function(**{name: value for name, value in given.items() if name in parameters}))


def _beside(base: Callable[..., Any] | None, name: str) -> Callable[..., Any] | None:
    """A function by this name in the script that the provider comes from."""
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
    """Megatron's name for the part, by which it chooses evaluation batch sizes; None if it has none."""
    module = project.modules.get("builder", "").rpartition(".")[0]
    try:
        splits = importlib.import_module(f"{module}.utils").Split if module else None
    except (ImportError, AttributeError):
        return None
    return getattr(splits, part, None)


def form_of(
    args: Any,
    packing: PackingConfig,
    *,
    text: bool,
    eod: Callable[[], int],
    spans: Sequence[str] = (),
    fillers: Sequence[str] = (),
    images: bool = False,
    logged: bool = False,
) -> SampleForm:
    """The form of the samples that this Megatron's ``get_batch`` takes, from its arguments.

    Args:
        args: Megatron's arguments.
        packing: the stream's.
        text: whether this is Megatron-DeepSpeed.
        eod: returns the end-of-document token; called only if something depends on it.
        spans: names of the sources that mark which of their tokens are trained.
        fillers: names of the sources that are cut to fill the space that whole documents leave.
        images: whether the blend has sources with images.
        logged: whether something above the loader removes the sample identities from every batch again.

    Raises:
        UsageError: flags under which these samples would be trained wrongly; names the flags that would be right.
    """
    apart = not packing.traits.cuts or packing.align > 1
    flags = {name: bool(getattr(args, name, False)) for name in _RESETS}
    identity = os.environ.get(IDENTITY_VARIABLE, "0") not in ("", "0")
    if images:
        _check_images(args, text=text)
        return SampleForm(images=True, across=False, identity=identity, logged=logged)
    if text:
        _check_sources_of_text(spans, fillers)
        if apart:
            _check_text(flags, packing)
        return SampleForm(
            text=True, across=not apart, identity=identity, logged=logged, eod=eod()
        )  # padding is written as ends of documents
    cu_seqlens = _cu_seqlens(args, packing)
    content = flags if not apart and cu_seqlens is None else {"eod_mask_loss": flags["eod_mask_loss"]}
    return SampleForm(
        across=not apart,
        attention_mask=cu_seqlens is None and bool(getattr(args, "create_attention_mask_in_dataloader", True)),
        cu_seqlens=cu_seqlens,
        align=packing.align,
        eod=eod() if any(content.values()) else None,
        # Since 0.18, context parallelism cuts every tensor of the batch along the sequence, even ones unknown to it.
        identity=identity and getattr(args, "context_parallel_size", 1) == 1,
        logged=logged,
        **content,
    )


_RESETS = {
    "reset_position_ids": "--reset-position-ids",
    "reset_attention_mask": "--reset-attention-mask",
    "eod_mask_loss": "--eod-mask-loss",
}


def _check_images(args: Any, *, text: bool) -> None:
    if text:
        raise UsageError(
            "Megatron-DeepSpeed's scripts take no images",
            found="a data config with images",
            expected="sources of text",
            action="train with megaresume.attach in your own DeepSpeed loop, or with Megatron-LM",
        )
    if args.dataloader_type != "external":
        raise UsageError(
            "batches with images have different sizes: Megatron's loader cannot stack them",
            found=f"--dataloader-type {args.dataloader_type} and a data config with images",
            expected="--dataloader-type external, and a get_batch that takes whole batches",
            action="pass --dataloader-type external; in get_batch, megaresume.batches.models.for_mcore_llava(batch) "
            "makes the arguments of the model",
        )


def _check_sources_of_text(spans: Sequence[str], fillers: Sequence[str]) -> None:
    way = "train with megaresume.attach in your own DeepSpeed loop, or with Megatron-LM"
    if spans:
        raise UsageError(
            "Megatron-DeepSpeed trains every token, and there are sources that say which are trained",
            found=f"spans of trained tokens: {', '.join(spans)}",
            expected="corpora without spans",
            cause="its get_batch takes tokens alone and makes the loss mask of them",
            action=f"{way}; or leave these sources out",
        )
    if fillers:
        raise UsageError(
            "with Megatron-DeepSpeed, documents of one sample would see each other",
            found=f"packing: split of {', '.join(fillers)}, beside documents that stay whole",
            expected="one packing for all sources",
            cause="it finds documents by their end-of-document tokens, and what is cut in two does not end with one",
            action=f"remove packing: split from {', '.join(fillers)}; or {way}",
        )


def _check_text(flags: dict[str, bool], packing: PackingConfig) -> None:
    missing = [flag for name, flag in _RESETS.items() if not flags[name]]
    if missing:
        raise UsageError(
            f"with packing {packing.mode}, documents of one sample would see each other",
            found=f"packing {packing.mode} (align {packing.align}) without {' '.join(missing)}",
            expected=" ".join(_RESETS.values()),
            cause="Megatron-DeepSpeed finds documents by their end-of-document tokens, and only if told to",
            action=f"add {' '.join(missing)}, or use packing split without align",
        )


def _cu_seqlens(args: Any, packing: PackingConfig) -> Literal["padded", "exact"] | None:
    """The form in which this version takes document bounds, if it does."""
    if getattr(args, "dataloader_inter_document_masking", False):
        flag, form = "--dataloader-inter-document-masking", "padded"
    # --sft packs since the version with --hybrid-context-parallel (0.16), with padded bounds since 0.19.
    elif getattr(args, "sft", False) and hasattr(args, "hybrid_context_parallel"):
        flag, form = "--sft", "padded" if hasattr(args, "dataloader_inter_document_masking") else "exact"
    else:
        return None
    if form == "exact" and args.micro_batch_size != 1:
        raise UsageError(
            "packed samples need micro-batches of one sample in this version of Megatron",
            found=f"{flag} with --micro-batch-size {args.micro_batch_size}",
            expected="--micro-batch-size 1",
            action="pass --micro-batch-size 1 and a longer --seq-length",
        )
    if flag == "--sft" and getattr(args, "create_attention_mask_in_dataloader", False):
        raise UsageError(
            "packed samples have no attention mask",
            found=f"{flag}, and masks are made in the data loader",
            expected="no mask: the bounds of the documents say it all",
            action="pass --no-create-attention-mask-in-dataloader",
        )
    _check_align(args, packing, flag)
    return "padded" if form == "padded" else "exact"


def _check_align(args: Any, packing: PackingConfig, flag: str) -> None:
    cp = int(getattr(args, "context_parallel_size", 1) or 1)
    if cp == 1:
        return
    tp = int(args.tensor_model_parallel_size) if getattr(args, "sequence_parallel", False) else 1
    need = 2 * cp * tp
    if packing.align % need:
        raise UsageError(
            "context parallelism cuts every document into equal parts, and these do not divide",
            found=f"packing.align {packing.align} with --context-parallel-size {cp}"
            + (f", --sequence-parallel and --tensor-model-parallel-size {tp}" if tp > 1 else "")
            + f" and {flag}",
            expected=f"a multiple of {need}",
            action=f"set packing: {{mode: {packing.mode}, align: {need}}} in data.yaml",
        )


def warnings_of(args: Any, form: SampleForm, packing: PackingConfig) -> list[str]:
    """Warnings about flags that are allowed but rarely intended: documents of one sample that attend to each other."""
    if packing.traits.bins is None or form.cu_seqlens is not None:
        return []
    if not form.text and not form.attention_mask:
        why = "no attention mask is made in the data loader"
    elif getattr(args, "use_flash_attn", False) or getattr(args, "use_flash_attn_v2", False):
        why = "flash attention ignores the attention mask"
    elif not form.text and getattr(args, "transformer_impl", "local") != "local":
        why = f"--transformer-impl {args.transformer_impl} ignores the attention mask"
    elif getattr(args, "masked_softmax_fusion", False):
        why = "the fused softmax ignores the attention mask (--no-masked-softmax-fusion)"
    else:
        return []
    way = "--dataloader-inter-document-masking"
    if not hasattr(args, "dataloader_inter_document_masking"):
        way = "--transformer-impl local --no-masked-softmax-fusion" if not form.text else "--no-masked-softmax-fusion"
        way += ", without flash attention,"
    return [f"packing {packing.mode}, but documents of one sample see each other: {why}. {way} keeps them apart."]
