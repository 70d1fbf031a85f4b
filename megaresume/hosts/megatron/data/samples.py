"""Samples of a stream as items with the keys that Megatron's ``get_batch`` takes.

    Megatron-LM           tokens, labels, loss_mask, position_ids
      + attention_mask           unless --no-create-attention-mask-in-dataloader
      + cu_seqlens, max_seqlen   with --dataloader-inter-document-masking (from 0.19) or --sft (from 0.16)
    Megatron-DeepSpeed    text: the tokens of the sample and the one after them
    a blend with images   a whole `megaresume.batches.batch.Batch`, with --dataloader-type external: no two have the
                          same number of images, and get_batch of a multimodal script is its own

Two kinds of samples:

    split              as GPTDataset's: a token's label is the token after it, also where that begins another document;
                       --reset-position-ids, --reset-attention-mask and --eod-mask-loss mean what they mean there
    best_fit, none     documents are kept apart: the last token of a document has no label, position ids begin again
                       in every document, and where there is an attention mask it is the document's own

An item is a pure function of its number: neither workers nor ranks enter. Compiled loops make a batch at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data

from megaresume.batches.assemble import Arrays, Layout
from megaresume.batches.dataset import StreamDataset
from megaresume.batches.loader import outlive_signals
from megaresume.stream.compiled import compiled
from megaresume.stream.config import PackingConfig
from megaresume.stream.errors import CorpusError, StreamExhausted, UsageError
from megaresume.stream.planning.kernel import DOCUMENT, LENGTH, SOURCE
from megaresume.stream.planning.plan import Plan, concatenate
from megaresume.stream.stream import Stream


@compiled
def cross_documents(bounds, num_bounds, filled, follows, tokens, labels, loss_mask):  # type: ignore[no-untyped-def]
    """Give the last token of every document the label that GPTDataset gives it: the token after it.

    Args:
        bounds, num_bounds: of the `Layout`.
        filled: int64[m], tokens of documents in each sample; after them comes padding.
        follows: int64[m], the token after the sample; -1: unknown, or not needed.
        tokens, labels: int64[m, S]. loss_mask: float32[m, S]. The last two are written.
    """
    first, length = 0, tokens.shape[1]
    for row in range(num_bounds.size):
        for k in range(first + 1, first + num_bounds[row] - 1):
            start = bounds[k]
            if start < filled[row]:
                labels[row, start - 1] = tokens[row, start]
                loss_mask[row, start - 1] = 1
        if follows[row] >= 0:
            labels[row, length - 1] = follows[row]
            loss_mask[row, length - 1] = 1
        first += num_bounds[row]


@compiled
def count_from(tokens, eod, position_ids):  # type: ignore[no-untyped-def]
    """Position ids that begin again after every ``eod``: int64[m, S], written."""
    for row in range(tokens.shape[0]):
        position = 0
        for i in range(tokens.shape[1]):
            position_ids[row, i] = position
            position = 0 if tokens[row, i] == eod else position + 1


#: Environment variable: 1 adds the next two keys to every item, for the audit of a training loop.
IDENTITY_VARIABLE = "MEGARESUME_SAMPLE_IDS"
#: the number of each sample in the stream: int64.
SAMPLE_KEY = "megaresume_sample"
#: what each sample is: the bits of its identity hash, int64.
HASH_KEY = "megaresume_hash"

Item = dict[str, torch.Tensor]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleForm:
    """What an item holds."""

    #: whole micro-batches with images instead of items (Megatron-LM with --dataloader-type external).
    images: bool = False
    #: one ``text`` of S + 1 tokens instead of everything else.
    text: bool = False
    #: labels go on into the next document, as GPTDataset's do; documents are ended by the token ``eod`` alone.
    across: bool = True
    #: begin position ids again after every ``eod`` (``across``).
    reset_position_ids: bool = False
    #: attention does not look back over an ``eod`` (``across``).
    reset_attention_mask: bool = False
    #: no loss at ``eod``.
    eod_mask_loss: bool = False
    #: add bool[1, S, S].
    attention_mask: bool = False
    #: int32[S + 1], filled up with S (``padded``); as long as it is (``exact``: micro-batches of one sample).
    cu_seqlens: Literal["padded", "exact"] | None = None
    #: segments start and end at multiples of this, in ``cu_seqlens``.
    align: int = 1
    #: the end-of-document token; None: nothing asks for it.
    eod: int | None = None
    #: add `SAMPLE_KEY` and `HASH_KEY`. Small tensors too are costly to hand over from worker processes.
    identity: bool = False
    #: add them in any case: they are taken out again before ``get_batch``.
    logged: bool = False


def form_of(
    args: Any,
    packing: PackingConfig,
    *,
    text: bool,
    eod: Callable[[], int],
    images: bool = False,
    logged: bool = False,
) -> SampleForm:
    """What this Megatron's ``get_batch`` takes, from its arguments.

    Args:
        args: Megatron's arguments.
        packing: of the stream.
        text: Megatron-DeepSpeed.
        eod: gives the end-of-document token; called only where something depends on it.
        images: the blend has sources with images.
        logged: somebody above the loader takes what identifies the samples out of every batch again.

    Raises:
        UsageError: flags under which these samples would be trained wrongly, with those that make it right.
    """
    apart = packing.mode != "split" or packing.align > 1
    flags = {name: bool(getattr(args, name, False)) for name in _RESETS}
    identity = os.environ.get(IDENTITY_VARIABLE, "0") not in ("", "0")
    if images:
        _check_images(args, text=text)
        return SampleForm(images=True, across=False, identity=identity, logged=logged)
    if text:
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
        # From 0.18 on, context parallelism cuts every tensor of the batch along the sequence, also those it knows not.
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
            action="train with megaresume.attach in a DeepSpeed loop of your own, or with Megatron-LM",
        )
    if args.dataloader_type != "external":
        raise UsageError(
            "batches with images are of different sizes: Megatron's loader cannot stack them",
            found=f"--dataloader-type {args.dataloader_type} and a data config with images",
            expected="--dataloader-type external, and a get_batch that takes whole batches",
            action="pass --dataloader-type external; in get_batch, megaresume.batches.models.for_mcore_llava(batch) "
            "makes the arguments of the model",
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
    """How this version takes the bounds of documents, if it does."""
    if getattr(args, "dataloader_inter_document_masking", False):
        flag, form = "--dataloader-inter-document-masking", "padded"
    # --sft packs since the version that brought --hybrid-context-parallel (0.16), with bounds padded since 0.19.
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
    """What is not wrong by the flags, but hardly meant: documents of one sample that see each other."""
    if packing.mode not in ("best_fit", "knapsack") or form.cu_seqlens is not None:
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


class SampleDataset(torch.utils.data.Dataset[Item]):
    """Samples of a stream by number, for Megatron's samplers and torch's default collation.

    Args:
        stream: the stream.
        form: what an item holds.
        num_samples: what ``len`` answers: samples of the run, for Megatron's samplers.
        first: number in the stream of item 0: other than 0 where Megatron counts from the start of a phase.
        index_split: which part this is, in the words of this Megatron, if it asks.
    """

    def __init__(
        self, stream: Stream, form: SampleForm, *, num_samples: int, first: int = 0, index_split: Any = None
    ) -> None:
        self.form = form
        self._num_samples = num_samples
        self._first = first
        if index_split is not None:  # only then: Megatron asks with hasattr
            self.index_split = index_split
        pad_id = form.eod if form.text and form.eod is not None else 0
        self._inner = StreamDataset(stream, pad_id=pad_id)
        self._shared: dict[str, torch.Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are spawned: without what can be made again."""
        return self.__dict__ | {"_shared": {}}

    @property
    def stream(self) -> Stream:
        """The stream, in this process."""
        return self._inner.stream

    def __len__(self) -> int:
        """Samples of the run."""
        return self._num_samples

    def __getitem__(self, index: int) -> Item:
        """One sample."""
        item: Item = self.__getitems__([index])[0]
        return item

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """A micro-batch, read together: torch asks for whole batches where a dataset has this method.

        Returns:
            One item a sample, in the order of ``indices``; with images one `Batch`.

        Raises:
            StreamExhausted: the stream ends within the global batch of these samples; on every rank alike.
            CorpusError: a document is damaged; or, for ``text``, does not end with the end-of-document token.
        """
        if torch.utils.data.get_worker_info() is not None:
            outlive_signals()  # here, since the loader is Megatron's own
        samples = [self._first + int(index) for index in indices]
        if self.form.images:
            return self._batch(samples)
        assembler = self._inner.assembler
        plan = self._plan(samples)
        arrays = Arrays.empty(len(plan), assembler.seq_length)
        layout = assembler.fill(plan, arrays)
        items = (
            self._text(samples, plan, layout, arrays) if self.form.text else self._keys(samples, plan, layout, arrays)
        )
        if self.form.identity or self.form.logged:
            hashes = torch.from_numpy(plan.hashes.view(np.int64).copy()).unbind()
            for item, number, identity in zip(items, torch.tensor(samples).unbind(), hashes, strict=True):
                item[SAMPLE_KEY], item[HASH_KEY] = number, identity
        return items

    def _batch(self, samples: list[int]) -> Any:
        self._check_end(samples[-1])
        batch: Any = self._inner.__getitems__(samples)
        if self.form.identity or self.form.logged:
            batch[SAMPLE_KEY], batch[HASH_KEY] = batch["samples"], batch["hashes"]
        return batch

    def _plan(self, samples: list[int]) -> Plan:
        self._check_end(samples[-1])
        first, stop = samples[0], samples[-1] + 1
        if samples == list(range(first, stop)):
            return self.stream.plan(first, stop)
        return concatenate([self.stream.plan(sample, sample + 1) for sample in samples])

    def _check_end(self, sample: int) -> None:
        """All samples of its global batch must exist: a rank that ran dry alone would leave the others waiting."""
        schedule = self.stream.schedule
        if schedule is not None:
            _, stop = schedule.step_of(sample)
            self.stream.plan(stop - 1, stop)

    def _following(self, samples: list[int], arrays: Arrays, filled: Int64Array) -> Int64Array:
        """The token after each sample that ends with a document: int64[m]; -1 for the others, and at the end of all.

        (Where a document goes on in the next sample, the label of its last token here is known already.)
        """
        follows = np.full(len(samples), -1, np.int64)
        length = self._inner.assembler.seq_length
        for row in np.flatnonzero((arrays.loss_mask[:, -1] == 0) & (filled == length)).tolist():
            if row + 1 < len(samples) and samples[row + 1] == samples[row] + 1:
                follows[row] = arrays.tokens[row + 1, 0]
                continue
            try:
                after = self.stream.plan(samples[row] + 1, samples[row] + 2)
            except StreamExhausted:
                continue
            one = Arrays.empty(1, length)
            self._inner.assembler.fill(after, one)
            follows[row] = one.tokens[0, 0]
        return follows

    def _keys(self, samples: list[int], plan: Plan, layout: Layout, arrays: Arrays) -> list[Item]:
        form = self.form
        eod = -1 if form.eod is None else form.eod
        if form.across:
            filled = plan.tokens()
            follows = self._following(samples, arrays, filled)
            cross_documents(
                layout.bounds, layout.num_bounds, filled, follows, arrays.tokens, arrays.labels, arrays.loss_mask
            )
        if form.eod_mask_loss:
            arrays.loss_mask[arrays.tokens == eod] = 0
        tokens, labels = torch.from_numpy(arrays.tokens), torch.from_numpy(arrays.labels)
        loss_mask = torch.from_numpy(arrays.loss_mask)
        columns = {"tokens": tokens.unbind(), "labels": labels.unbind(), "loss_mask": loss_mask.unbind()}
        if form.across and form.cu_seqlens is None:
            if form.reset_position_ids:
                count_from(arrays.tokens, eod, arrays.position_ids)
            else:
                columns["position_ids"] = (self._positions(),) * len(tokens)
        if "position_ids" not in columns:
            columns["position_ids"] = torch.from_numpy(arrays.position_ids).unbind()
        if form.attention_mask:
            columns["attention_mask"] = self._masks(layout, arrays.tokens)
        if form.cu_seqlens is not None:
            columns["cu_seqlens"], columns["max_seqlen"] = self._bounds(layout)
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _text(self, samples: list[int], plan: Plan, layout: Layout, arrays: Arrays) -> list[Item]:
        eod = self.form.eod if self.form.eod is not None else 0
        following = np.full(len(plan), eod, np.int64)
        if self.form.across:
            follows = self._following(samples, arrays, plan.tokens())
            following = np.where(follows < 0, eod, follows)
        else:
            _check_ends(plan, layout, arrays.tokens, eod, self.stream)
        text = np.empty((len(plan), arrays.tokens.shape[1] + 1), np.int64)
        text[:, :-1] = arrays.tokens
        text[:, -1] = np.where(arrays.loss_mask[:, -1] == 0, following, arrays.labels[:, -1])
        return [{"text": row} for row in torch.from_numpy(text).unbind()]

    def _positions(self) -> torch.Tensor:
        return self._share("positions", lambda: torch.arange(self._inner.assembler.seq_length))

    def _share(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]

    def _masks(self, layout: Layout, tokens: Int64Array) -> tuple[torch.Tensor, ...]:
        """bool[1, S, S] for each sample, True where attention is not allowed."""
        length = tokens.shape[1]
        causal = self._share("causal", lambda: torch.ones(1, length, length, dtype=torch.bool).triu_(diagonal=1))
        if self.form.across and not self.form.reset_attention_mask:
            return (causal,) * len(tokens)
        masks = []
        ends = np.cumsum(layout.num_bounds)
        for row, end in enumerate(ends.tolist()):
            starts: npt.NDArray[Any]
            if self.form.across:
                starts = np.flatnonzero(tokens[row, :-1] == self.form.eod) + 1
            else:
                starts = layout.bounds[end - layout.num_bounds[row] + 1 : end - 1]
            mask = causal.clone()
            begin = 0
            for start in starts.tolist():
                mask[0, start:, begin:start] = True
                begin = start
            masks.append(mask)
        return tuple(masks)

    def _bounds(self, layout: Layout) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """``cu_seqlens`` and ``max_seqlen`` of each sample."""
        length, align = self._inner.assembler.seq_length, self.form.align
        rows, longest = [], []
        end = 0
        for num in layout.num_bounds.tolist():
            begin, end = end, end + num
            # Padding after the last document belongs to it, up to a multiple of `align`.
            bounds = np.unique(-(-layout.bounds[begin:end] // align) * align)
            row = np.full(length + 1 if self.form.cu_seqlens == "padded" else len(bounds), length, np.int32)
            row[: len(bounds)] = bounds
            rows.append(torch.from_numpy(row))
            longest.append(int(np.diff(bounds).max()))
        return tuple(rows), torch.tensor(longest, dtype=torch.int32).unbind()


def _check_ends(plan: Plan, layout: Layout, tokens: Int64Array, eod: int, stream: Stream) -> None:
    """Every document that another one follows directly must end with ``eod``: nothing else tells them apart."""
    columns, rows = layout.columns, layout.rows
    directly = (columns[1:] > 0) & (columns[:-1] + plan.table[:-1, LENGTH] == columns[1:])
    wrong = directly & (tokens[rows[1:], columns[1:] - 1] != eod)
    if wrong.any():
        k = int(np.flatnonzero(wrong)[0])
        source, document = int(plan.table[k, SOURCE]), int(plan.table[k, DOCUMENT])
        raise CorpusError(
            "a document does not end with the end-of-document token",
            found=f"document {document} of source '{stream.config.sources[source].name}' ends with token "
            f"{int(tokens[rows[k], columns[k + 1] - 1])}",
            expected=f"token {eod}, which Megatron-DeepSpeed finds the ends of documents by",
            cause="the corpus was prepared without --append-eod, or with another tokenizer",
            action="prepare the corpus again with --append-eod, or use packing split",
        )
