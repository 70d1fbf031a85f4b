"""Samples of a stream as items with the keys that Megatron's ``get_batch`` expects.

    Megatron-LM           tokens, labels, loss_mask, position_ids
      + attention_mask           unless --no-create-attention-mask-in-dataloader
      + cu_seqlens, max_seqlen   with --dataloader-inter-document-masking (since 0.19) or --sft (since 0.16)
    Megatron-DeepSpeed    text: the tokens of the sample and the one after them
    a blend with images   a whole `megaresume.batches.batch.Batch`, with --dataloader-type external: no two have the
                          same number of images, and a multimodal script has its own get_batch

Two kinds of samples:

    split              like GPTDataset's: a token's label is the next token, even if that begins another document;
                       --reset-position-ids, --reset-attention-mask and --eod-mask-loss mean the same as there
    every other        documents are kept apart: the last token of a document has no label, position ids restart in
                       every document, and an attention mask, if any, is per document

The loss mask belongs to the label: for a corpus with spans, 1 where the label is a trained token. Labels are also
filled in where they do not count.

An item is a pure function of its number, independent of workers and ranks. Compiled loops make a batch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data

from megaresume.batches.batch import BatchArrays, SegmentLayout
from megaresume.batches.loader import StreamDataset
from megaresume.batches.workers import outlive_signals
from megaresume.data.source import Source
from megaresume.stream.arrays import Int64Array
from megaresume.stream.batches import Balance
from megaresume.stream.compiled import compiled
from megaresume.stream.dealing import dealt_order
from megaresume.stream.errors import CorpusError, StreamExhausted, UsageError
from megaresume.stream.kernel import DOCUMENT, LENGTH, OFFSET, SOURCE
from megaresume.stream.planner import Plan
from megaresume.stream.source import count_trained
from megaresume.stream.stream import Stream

#: The number of each sample in the stream: int64.
SAMPLE_KEY = "megaresume_sample"
#: The identity hash of each sample, its bits as int64.
HASH_KEY = "megaresume_hash"
#: Environment variable: 1 adds both to every item, to audit a training loop.
IDENTITY_VARIABLE = "MEGARESUME_SAMPLE_IDS"

Item = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleForm:
    """The form of an item."""

    #: Whole micro-batches with images instead of items (Megatron-LM with --dataloader-type external).
    images: bool = False
    #: A single ``text`` of S + 1 tokens instead of everything else.
    text: bool = False
    #: Labels continue into the next document, as GPTDataset's do; only the token ``eod`` ends documents.
    across: bool = True
    #: Position ids restart after every ``eod`` (with ``across``).
    reset_position_ids: bool = False
    #: Attention does not look back past an ``eod`` (with ``across``).
    reset_attention_mask: bool = False
    #: No loss at ``eod``.
    eod_mask_loss: bool = False
    #: Add an attention mask, bool[1, S, S].
    attention_mask: bool = False
    #: int32[S + 1], filled up with S (``padded``), or without filling (``exact``: micro-batches of one sample).
    cu_seqlens: Literal["padded", "exact"] | None = None
    #: Segments start and end at multiples of this in ``cu_seqlens``.
    align: int = 1
    #: The end-of-document token; None if nothing needs it.
    eod: int | None = None
    #: Add `SAMPLE_KEY` and `HASH_KEY`. Even small tensors are costly to pass from worker processes.
    identity: bool = False
    #: Add them in any case, to be removed again before ``get_batch``.
    logged: bool = False

    @property
    def masks_of_the_plan(self) -> bool:
        """Whether loss masks depend on the documents alone, so that `megaresume verify` can recompute them."""
        return not (self.text or self.across or self.eod_mask_loss)


@compiled
def cross_documents(rows, columns, trained, tokens, labels, loss_mask):  # type: ignore[no-untyped-def]
    """Give the last token of every document the label that GPTDataset gives it: the next token in the sample.

    Args:
        rows, columns: those of the `Layout`.
        trained: bool[n], whether the first token of each segment is trained.
        tokens, labels: int64[m, S]. loss_mask: float32[m, S]. Labels and mask are written.
    """
    for k in range(1, rows.size):
        row, start = rows[k], columns[k]
        if row == rows[k - 1]:
            labels[row, start - 1] = tokens[row, start]
            loss_mask[row, start - 1] = trained[k]


@compiled
def count_from(tokens, eod, position_ids):  # type: ignore[no-untyped-def]
    """Write position ids that restart after every ``eod``, int64[m, S]."""
    for row in range(tokens.shape[0]):
        position = 0
        for i in range(tokens.shape[1]):
            position_ids[row, i] = position
            position = 0 if tokens[row, i] == eod else position + 1


class SampleDataset(torch.utils.data.Dataset[Item]):
    """Samples of a stream by number, for Megatron's samplers and torch's default collation.

    Args:
        stream: the stream.
        form: what an item holds.
        num_samples: result of ``len``: the samples of the run, for Megatron's samplers.
        first: number in the stream of item 0; not 0 if Megatron counts from the start of a phase.
        index_split: Megatron's name for this part, if it asks for one.
        deal: chooses the samples of this rank; None: those that its sampler counts.
    """

    def __init__(
        self,
        stream: Stream,
        form: SampleForm,
        *,
        num_samples: int,
        first: int = 0,
        index_split: Any = None,
        deal: RankDeal | None = None,
    ) -> None:
        self.form = form
        self._deal = deal
        self._num_samples = num_samples
        self._first = first
        if index_split is not None:  # only then, as Megatron asks with hasattr
            self.index_split = index_split
        pad_id = form.eod if form.text and form.eod is not None else 0
        self._inner = StreamDataset(stream, pad_id=pad_id)
        self._shared: dict[str, torch.Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For spawned workers: leaves out what can be made again."""
        return self.__dict__ | {"_shared": {}}

    @property
    def stream(self) -> Stream:
        """The stream as opened in this process."""
        return self._inner.stream

    def __len__(self) -> int:
        """Number of samples in the run."""
        return self._num_samples

    def __getitem__(self, index: int) -> Item:
        """One sample."""
        item: Item = self.__getitems__([index])[0]
        return item

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """A micro-batch, read together: torch asks for whole batches if a dataset has this method.

        Returns:
            One item per sample, in the order of ``indices``; with images, one `Batch`.

        Raises:
            StreamExhausted: the stream ends within the global batch of these samples; the same on every rank.
            CorpusError: a document is damaged, or (for ``text``) does not end with the end-of-document token.
            UsageError: ranks are balanced, and the sampler is not Megatron's.
        """
        if torch.utils.data.get_worker_info() is not None:
            outlive_signals()  # here, since Megatron itself makes the loader
        samples = [self._first + int(index) for index in indices]
        if self._deal is not None:
            samples = self._deal.samples(self.stream, samples)
        if self.form.images:
            return self._batch(samples)
        assembler = self._inner.assembler
        plan = self._plan(samples)
        arrays = BatchArrays.empty(len(plan), assembler.seq_length)
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
        return self._inner.plan_of(samples)

    def _check_end(self, sample: int) -> None:
        """Check that all samples of its global batch exist: if one rank ran dry alone, the others would hang."""
        schedule = self.stream.schedule
        if schedule is not None:
            _, stop = schedule.step_of(sample)
            self.stream.plan(stop - 1, stop)

    def _cross(self, samples: list[int], plan: Plan, layout: SegmentLayout, arrays: BatchArrays) -> None:
        """Label the last token of every document with the next token, which may be in the next sample."""
        trained = self._is_first_token_trained(plan)
        cross_documents(layout.rows, layout.columns, trained, arrays.tokens, arrays.labels, arrays.loss_mask)
        for row in self._end_documents(plan, arrays):
            if row + 1 < len(samples) and samples[row + 1] == samples[row] + 1:
                token, counts = arrays.tokens[row + 1, 0], trained[plan.starts[row + 1]]
            else:
                try:
                    after = self.stream.plan(samples[row] + 1, samples[row] + 2)
                except StreamExhausted:
                    continue  # the very last token has no label
                one = BatchArrays.empty(1, arrays.tokens.shape[1])
                self._inner.assembler.fill(after, one)
                token, counts = one.tokens[0, 0], self._is_first_token_trained(after)[0]
            arrays.labels[row, -1], arrays.loss_mask[row, -1] = token, counts

    def _end_documents(self, plan: Plan, arrays: BatchArrays) -> list[int]:
        """Rows whose last token ends its document; in all others that token's label is known already."""
        full = plan.tokens() == arrays.tokens.shape[1]
        rows = np.flatnonzero(full & (arrays.loss_mask[:, -1] == 0)).tolist()  # with spans, some more
        last = plan.table[plan.starts[1:] - 1]
        sources = cast(Sequence[Source], self.stream.sources)
        return [
            row
            for row in rows
            if sources[last[row, SOURCE]].lengths(last[row, [DOCUMENT]])[0] == last[row, OFFSET] + last[row, LENGTH]
        ]

    def _is_first_token_trained(self, plan: Plan) -> npt.NDArray[np.bool_]:
        """Whether the first token of each segment is trained: bool[n]."""
        trained = np.ones(len(plan.table), np.bool_)
        for i in self._inner.assembler.masked:
            mine = np.flatnonzero(plan.table[:, SOURCE] == i)
            documents, offsets = plan.table[mine, DOCUMENT], plan.table[mine, OFFSET]
            trained[mine] = count_trained(self.stream.sources[i], documents, offsets, np.ones_like(mine)) > 0
        return trained

    def _keys(self, samples: list[int], plan: Plan, layout: SegmentLayout, arrays: BatchArrays) -> list[Item]:
        form = self.form
        eod = -1 if form.eod is None else form.eod
        if form.across:
            self._cross(samples, plan, layout, arrays)
        if form.eod_mask_loss:
            arrays.loss_mask[arrays.tokens == eod] = 0
        tokens, labels = torch.from_numpy(arrays.tokens), torch.from_numpy(arrays.labels)
        loss_mask = torch.from_numpy(arrays.loss_mask)
        columns = {"tokens": tokens.unbind(), "labels": labels.unbind(), "loss_mask": loss_mask.unbind()}
        if form.across and form.cu_seqlens is None:
            if form.reset_position_ids:
                count_from(arrays.tokens, eod, arrays.position_ids)
            else:
                length = self._inner.assembler.seq_length
                columns["position_ids"] = (self._share("positions", lambda: torch.arange(length)),) * len(tokens)
        if "position_ids" not in columns:
            columns["position_ids"] = torch.from_numpy(arrays.position_ids).unbind()
        if form.attention_mask:
            columns["attention_mask"] = self._masks(layout, arrays.tokens)
        if form.cu_seqlens is not None:
            columns["cu_seqlens"], columns["max_seqlen"] = self._bounds(layout)
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _text(self, samples: list[int], plan: Plan, layout: SegmentLayout, arrays: BatchArrays) -> list[Item]:
        eod = self.form.eod if self.form.eod is not None else 0
        if self.form.across:
            self._cross(samples, plan, layout, arrays)
        else:
            _check_ends(plan, layout, arrays.tokens, eod, self.stream)
        text = np.empty((len(plan), arrays.tokens.shape[1] + 1), np.int64)
        text[:, :-1] = arrays.tokens
        text[:, -1] = np.where(arrays.loss_mask[:, -1] == 0, eod, arrays.labels[:, -1])
        return [{"text": row} for row in torch.from_numpy(text).unbind()]

    def _share(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]

    def _masks(self, layout: SegmentLayout, tokens: Int64Array) -> tuple[torch.Tensor, ...]:
        """An attention mask per sample, bool[1, S, S], True where attention is not allowed."""
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

    def _bounds(self, layout: SegmentLayout) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """``cu_seqlens`` and ``max_seqlen`` of each sample."""
        length, align = self._inner.assembler.seq_length, self.form.align
        rows, longest = [], []
        end = 0
        for num in layout.num_bounds.tolist():
            begin, end = end, end + num
            # Padding after the last document counts as part of it, up to a multiple of `align`.
            bounds = np.unique(-(-layout.bounds[begin:end] // align) * align)
            row = np.full(length + 1 if self.form.cu_seqlens == "padded" else len(bounds), length, np.int32)
            row[: len(bounds)] = bounds
            rows.append(torch.from_numpy(row))
            longest.append(int(np.diff(bounds).max()))
        return tuple(rows), torch.tensor(longest, dtype=torch.int32).unbind()


def _check_ends(plan: Plan, layout: SegmentLayout, tokens: Int64Array, eod: int, stream: Stream) -> None:
    """Check that a document followed directly by another ends with ``eod``, as nothing else separates them."""
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


# Balanced ranks under Megatron's sampler


class RankDeal:
    """Which samples one data-parallel rank gets.

        sampler: consumed + k*D*m + r*m .. + m     the places of rank r in micro-step k, whatever lies there
          -> the step of a place                   by the planned global batch sizes
          -> the deal of its samples               `dealt_order`: by their costs, the same on every rank
          -> the sample at that place

    Depends only on the place and the layout; no process keeps any state for it.

    Args:
        balance: how the samples of a step are dealt.
        micro_batch_size: in samples.
        dp_rank, dp_size: this rank's, as Megatron's sampler sees them.
    """

    def __init__(self, balance: Balance, *, micro_batch_size: int, dp_rank: int, dp_size: int) -> None:
        self.balance = balance
        self.micro_batch_size = micro_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        #: The last step's first sample, and its samples in the order of their places.
        self._last: tuple[int, Int64Array] = (0, np.zeros(0, np.int64))

    def samples(self, stream: Stream, places: Sequence[int]) -> list[int]:
        """The samples at these places. Like samples, places count from the beginning of the stream.

        Raises:
            StreamExhausted: the stream ends within their step; the same on every rank.
            UsageError: they are not places of this rank.
        """
        return [self._sample(stream, place) for place in places]

    def _sample(self, stream: Stream, place: int) -> int:
        assert stream.schedule is not None, "an order has set it"
        first, stop = stream.schedule.step_of(place)
        if (place - first) // self.micro_batch_size % self.dp_size != self.dp_rank:
            raise self._foreign(place, first, stop)
        if (first, stop - first) != (self._last[0], len(self._last[1])):
            plan = stream.plan(first, stop)
            order = dealt_order(plan, self.balance, micro_batch_size=self.micro_batch_size, dp_size=self.dp_size)
            self._last = first, order
        return int(self._last[1][place - first])

    def _foreign(self, place: int, first: int, stop: int) -> UsageError:
        micro, size = self.micro_batch_size, self.dp_size
        return UsageError(
            "Megatron's sampler deals the samples differently than balanced ranks expect",
            found=f"sample {place}, of the step with {first} to {stop - 1}, on data-parallel rank {self.dp_rank}",
            expected=f"it on rank {(place - first) // micro % size}: {size} ranks get micro-batches of {micro} in turn",
            cause="a sampler of a fork; or a global batch size that the arguments do not tell",
            action="leave out --megaresume-balance",
        )
