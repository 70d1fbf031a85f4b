"""`SourceOrder`: which piece of which document is at a position of a source.

    position                0 ................. first ............ first ...........
    eras of the source      | epoch 0 | epoch 1 | the rest of 2    | epoch 3 | ...

An *era* is a run of positions with one set of pieces. A new era begins with the epoch after the sequence length
changed, or at once if nothing of the epoch was drawn: an epoch that has begun keeps its pieces, so that every token
comes exactly once in it. Positions only grow, by one per piece, through all eras.

A corpus that grew joins in the same way from the next epoch on; or at once, in an era that mixes the rest of the epoch
with the new pieces by a permutation of its own (`Era.rest`):

    slot j < rest      what would have been at position first + j of the era before
    slot j >= rest     new piece j - rest: the first pieces of the new documents, then their later ones

If pieces of similar lengths are grouped (`permutation.grouped`), a position of an era's epoch is looked up in a window
of positions around it.

Everything is O(1) for a position, and O(log) in the number of long documents. ``tests/stream/reference.py`` says the
same with lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megaresume.stream.arrays import Int64Array
from megaresume.stream.compiled import compiled
from megaresume.stream.data_yaml import GroupConfig, ShuffleConfig
from megaresume.stream.errors import StateError
from megaresume.stream.permutation import grouped, index_of, items_at, round_keys, window_of
from megaresume.stream.source import STRIDE, PieceLists
from megaresume.stream.state_text import Era, Eras

#: windows cached by an order: the one being read, and some for other queries and earlier eras.
REMEMBERED = 8


class SourceOrder(Eras):
    """The order of one source, immutable.

    Args:
        name: of the source, its first one.
        seed: of the stream.
        shuffle: in two levels.
        lists: of its long documents.
        eras: of the source; empty if nothing can be drawn from it yet.
        group: group pieces of similar lengths; None: as shuffled.
    """

    def __init__(
        self,
        name: str,
        seed: int,
        shuffle: ShuffleConfig | None,
        lists: PieceLists,
        eras: Sequence[Era] = (),
        group: GroupConfig | None = None,
    ) -> None:
        super().__init__(eras)
        self.name, self.seed, self.shuffle, self.lists, self.group = name, seed, shuffle, lists, group
        #: windows that were looked up last, by era, first position and last: see `grouped`.
        self._windows: dict[tuple[int, int, int], Int64Array] = {}

    def revised(self, position: int, *, documents: int, piece: int, now: bool = False, stage: int = 0) -> SourceOrder:
        """The order with other pieces from a position on.

        Args:
            position: the next one to be drawn.
            documents: of the source.
            piece: tokens of the longest piece; 0: documents are whole.
            now: new documents join the epoch that has begun, instead of the next one.
            stage: number of the stage that begins there.
        """
        eras = [era for era in self.eras if era.first <= position]  # future eras are decided again
        if not eras:
            return self._with([self._era(0, 0, documents, piece, stage)])
        last = eras[-1]
        if (last.documents, last.piece) == (documents, piece) and not last.rest:
            return self._with(eras)
        begin, end = self.epoch_bounds(last, position)
        epoch = last.epoch + (begin - last.first) // last.pieces
        if position == begin and not last.rest:
            if last.first == position and last.stage == stage:  # else its stage has looked ahead into it
                eras.pop()
            return self._with([*eras, self._era(position, epoch, documents, piece, stage)])
        if now and documents > last.documents:
            new = self.lists.num_pieces(documents, last.piece) - self.lists.num_pieces(last.documents, last.piece)
            left = end - position
            end += new
            grown = last._replace(first=position, epoch=epoch, documents=documents, stage=stage)
            eras.append(grown._replace(pieces=left + new, rest=left))
        return self._with([*eras, self._era(end, epoch + 1, documents, piece, stage)])

    def known_in(self, stage: int) -> SourceOrder:
        """The order as a stage knew it, without eras that later ones added."""
        known = [era for era in self.eras if era.stage <= stage]
        return self if len(known) == len(self.eras) else self._with(known)

    def _with(self, eras: Sequence[Era]) -> SourceOrder:
        return SourceOrder(self.name, self.seed, self.shuffle, self.lists, eras, self.group)

    def _era(self, first: int, epoch: int, documents: int, piece: int, stage: int) -> Era:
        pieces = self.lists.num_pieces(documents, piece)
        return Era(first=first, epoch=epoch, documents=documents, piece=piece, pieces=pieces, stage=stage)

    def check(self) -> None:
        """Raise a `StateError` unless the eras, read from a state, fit the corpus."""
        for k, era in enumerate(self.eras):
            before = self.eras[k - 1] if k else None
            if before is None:
                fits = (era.first, era.epoch, era.rest) == (0, 0, 0)
            else:
                begin, end = self.epoch_bounds(before, era.first)
                epoch = before.epoch + (begin - before.first) // before.pieces
                fits = era.first >= before.first and era.epoch == epoch
                fits &= era.rest == end - era.first if era.rest else era.first == begin
            num = self.lists.num_pieces(era.documents, era.piece)
            if era.rest and before is not None:
                num += era.rest - self.lists.num_pieces(before.documents, era.piece)
            if not fits or era.pieces != num:
                raise StateError(
                    f"source '{self.name}' is not made of the pieces that the state knows",
                    found=f"{num} pieces of {era.documents} documents, of at most {era.piece} tokens each",
                    expected=f"{era}, after {before}",
                    cause="the state was edited, or the list of long documents next to the corpus is damaged",
                    action="remove PREFIX.megaresume.*.pieces next to the corpus, or load an older checkpoint",
                )

    def epochs(self, positions: Int64Array) -> Int64Array:
        """The epochs of many positions: int64[n] to int64[n]."""
        fields = np.array([[e.first, e.epoch, (1 << 62) if e.rest else e.pieces] for e in self.eras], np.int64)
        first, epoch, pieces = fields.reshape(-1, 3)[np.searchsorted(self._firsts, positions, side="right") - 1].T
        return np.asarray(epoch + (positions - first) // pieces, np.int64)

    def pieces_at(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The pieces at some positions, all of one epoch and one era.

        Returns:
            int64[n] twice: the document, and the tokens of it that come before the piece.
        """
        return self._pieces(self._number(int(positions[0])), positions)

    def documents_at(self, positions: Int64Array) -> Int64Array:
        """The documents at any positions: int64[n] to int64[n]."""
        documents = np.empty_like(positions)
        runs = np.stack([np.searchsorted(self._firsts, positions, side="right"), self.epochs(positions)], axis=1)
        for run in np.unique(runs, axis=0):
            here = (runs == run).all(axis=1)
            documents[here] = self.pieces_at(positions[here])[0]
        return documents

    def _pieces(self, k: int, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The documents and pieces at positions of era k."""
        if self.group is None:
            return self._ungrouped(k, positions)
        left, moved = np.sort(positions), np.empty_like(positions)
        while len(left):
            first, places = self._window(k, int(left[0]))
            stop = first + len(places)
            here = (positions >= first) & (positions < stop)
            moved[here] = first + places[positions[here] - first]
            left = left[left.searchsorted(stop) :]
        return self._ungrouped(k, moved)

    def _window(self, k: int, position: int) -> tuple[int, Int64Array]:
        """The first position of a position's window, and its `grouped` order."""
        assert self.group is not None
        era, source = self.eras[k], self.lists.source
        first, stop = window_of(position, *self.epoch_bounds(era, position), self.group)
        places = self._windows.get((k, first, stop))
        if places is None:
            documents, _ = self._ungrouped(k, np.arange(first, stop))
            lengths = getattr(source, "sizes", source.lengths)(documents)
            epoch = era.epoch if era.rest else era.epoch + (first - era.first) // era.pieces
            keys = round_keys(self.seed, self.name, epoch, f"{_part(era)} batches at {first}".lstrip())
            if len(self._windows) >= REMEMBERED:
                self._windows.pop(next(iter(self._windows)), None)
            places = self._windows[k, first, stop] = grouped(lengths, first, self.group, keys)
        return first, places

    def _ungrouped(self, k: int, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The documents and pieces at positions of era k before grouping, without looking at lengths."""
        era = self.eras[k]
        if not era.rest:
            turn = (int(positions[0]) - era.first) // era.pieces
            indices = positions - (era.first + turn * era.pieces)
            return self._resolve(era, self._items(indices, era, era.epoch + turn))
        slots = self._items(positions - era.first, era, era.epoch)
        documents, offsets = np.empty_like(slots), np.empty_like(slots)
        old = slots < era.rest
        if old.any():
            documents[old], offsets[old] = self._pieces(k - 1, era.first + slots[old])
        if not old.all():
            known = self.eras[k - 1].documents
            new = slots[~old] - era.rest
            later = self.lists.num_pieces(known, era.piece) - known  # of the documents that were already there
            numbers = np.where(new < era.documents - known, new + known, new + known + later)
            documents[~old], offsets[~old] = self._resolve(era, numbers)
        return documents, offsets

    def _items(self, indices: Int64Array, era: Era, epoch: int) -> Int64Array:
        return items_at(indices, era.pieces, self.seed, self.name, epoch, self.shuffle, _part(era))

    def _resolve(self, era: Era, numbers: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The documents of pieces by their numbers, and the tokens that come before each."""
        if not era.piece:
            return numbers, np.zeros_like(numbers)
        offsets, long = np.empty_like(numbers), self.lists.of(era.piece)
        resolve(numbers, offsets, era.documents, era.piece, long.ids, long.ends, long.guide, STRIDE)
        return numbers, offsets

    def positions_of(self, document: int, epoch: int) -> list[int]:
        """The positions of all pieces of a document in an epoch, in the order of the document."""
        return list(self._positions_of(document, epoch))

    def _positions_of(self, document: int, epoch: int) -> Iterator[int]:
        """The positions of a document in an epoch; none if the document was added after the epoch."""
        first = next(k for k, e in reversed(list(enumerate(self.eras))) if e.epoch <= epoch and not e.rest)
        base = self.eras[first]
        joins = [e for e in self.eras[first + 1 :] if e.rest and e.epoch == epoch]
        known = base.documents
        for k, era in enumerate([base, *joins]):
            if document >= era.documents:
                known = era.documents
                continue
            later = self.lists.of(era.piece).of(document) if era.piece else range(0)
            for number in [document, *(era.documents + j for j in later)]:
                if k:
                    before = self.lists.num_pieces(known, era.piece) - known
                    new = number - known if number < era.documents else number - known - before
                    position = era.first + index_of(era.rest + new, era.pieces, *self._key(epoch), _part(era))
                else:
                    position = self.start_of(epoch) + index_of(number, era.pieces, *self._key(epoch), _part(era))
                yield self._moved(self._regrouped(era, position), joins[k:])
            return

    def _moved(self, position: int, joins: Sequence[Era]) -> int:
        """The position of a piece after these eras mixed new pieces into the rest of its epoch."""
        for era in joins:
            if position >= era.first:
                slot = position - era.first
                position = era.first + index_of(slot, era.pieces, *self._key(era.epoch), _part(era))
                position = self._regrouped(era, position)
        return position

    def _regrouped(self, era: Era, position: int) -> int:
        """The position after grouping by length of the piece that was shuffled to this one."""
        if self.group is None:
            return position
        first, places = self._window(self.eras.index(era), position)
        return first + int(np.flatnonzero(places == position - first)[0])

    def _key(self, epoch: int) -> tuple[int, str, int, ShuffleConfig | None]:
        return self.seed, self.name, epoch, self.shuffle


@compiled
def resolve(numbers, offsets, num_documents, piece, ids, ends, guide, stride):  # type: ignore[no-untyped-def]
    """The documents of pieces by their numbers, and the tokens of them that come before each.

    Args:
        numbers: int64[n], become the documents; later pieces are numbered from ``num_documents`` on.
        offsets: int64[n], written.
        num_documents: of the source.
        piece: tokens of the longest piece.
        ids, ends, guide: of `LongDocuments`, and ``stride`` of its guide.
    """
    for j in range(numbers.size):
        offsets[j], later = 0, numbers[j] - num_documents
        if later < 0:
            continue
        g = np.searchsorted(guide, later, side="right")
        first, stop = g * stride, min((g + 1) * stride, ends.size)
        at = first + np.searchsorted(ends[first:stop], later, side="right")
        if at == ends.size:
            raise IndexError("a piece beyond the last one")
        numbers[j], offsets[j] = ids[at], piece * (later + 1 - (ends[at - 1] if at > 0 else 0))


def _part(era: Era) -> str:
    """The key of the permutation of an era, besides its epoch."""
    return f"grown to {era.documents} at {era.first}" if era.rest else ""


class Orders(tuple[SourceOrder, ...]):
    """The orders of all sources."""

    def known_in(self, stage: int) -> Orders:
        """The orders as a stage knew them."""
        return Orders(order.known_in(stage) for order in self)

    def epochs(self, sources: Int64Array, positions: Int64Array) -> Int64Array:
        """The epochs of positions in sources: int64[n] twice to int64[n]."""
        pieces = np.array([o.eras[0].pieces if len(o.eras) == 1 else 1 for o in self], np.int64)
        epochs = positions // pieces[sources]
        for i, order in enumerate(self):
            if len(order.eras) > 1 and (mine := sources == i).any():
                epochs[mine] = order.epochs(positions[mine])
        return np.asarray(epochs, np.int64)
