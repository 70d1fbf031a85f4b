"""Random sequences of changes, skips and kills against a slow model of a run that is never interrupted."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaresume.stream.batches import BatchSchedule
from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import StateError
from megaresume.stream.skips import SkipConfig
from megaresume.stream.state import Segment, StreamState
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList
from tests.release import release
from tests.stream.model import Model

LENGTHS = {
    "a": [3, 9, 0, 5, 2, 30, 7, 8, 1],
    "b": [4, 4, 11, 6, 2],
    "c": [25, 1, 0, 13],
    "d": [16, 8, 3, 3, 40, 2, 7],
}
PACKINGS: list[dict[str, Any]] = [
    {"mode": "best_fit", "align": 1, "open_bins": 3, "max_age": 4},
    {"mode": "best_fit", "align": 4, "open_bins": 2, "max_age": 1000},
    {"mode": "split", "align": 1},
    {"mode": "split", "align": 4},
    {"mode": "none", "align": 1},
]
FILLS = {"packing": "split"}


class Run:
    """The real thing: config, stream, states; and the model beside it."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        #: whether some sources fill what the whole documents of others leave free.
        self.fills = data.draw(st.booleans())
        self.config: dict[str, Any] = {
            "seed": data.draw(st.integers(0, 99)),
            "seq_length": 16,
            "packing": self._any_packing(),
            "sources": {"a": {"weight": 2}, "b": {"weight": 1}} | ({"b": {"weight": 1} | FILLS} if self.fills else {}),
            "skip": {"samples": [], "documents": {}},
        }
        #: today's name -> first name.
        self.first = {"a": "a", "b": "b"}
        self.batch, self.sample = 4, 0
        self.schedule = BatchSchedule.constant(4)
        self.model = Model(seed=self.config["seed"], lengths=LENGTHS, packing=self.config["packing"], seq_length=16)
        self._stage()
        self.stream = self._open(None)
        self.saves: list[tuple[Any, ...]] = []
        self.save()

    def _any_packing(self) -> dict[str, Any]:
        return self.data.draw(st.sampled_from(PACKINGS[:-1] if self.fills else PACKINGS))

    def _shares(self) -> dict[str, int]:
        return {self.first[name]: entry["weight"] for name, entry in self.config["sources"].items()}

    def _open(self, state: StreamState | None) -> Stream:
        config = StreamConfig.from_dict(self.config)
        sources = [LengthList(LENGTHS[self.first[s.label]]) for s in config.sources]
        stream = Stream(config, sources, state=state, on_change="stage")
        stream.schedule = self.schedule
        return stream

    def train(self, steps: int) -> None:
        """Rank by rank, micro-batch by micro-batch, put together again by the numbers of the samples."""
        dp = self.data.draw(st.sampled_from([1, 2, 4]))
        for _ in range(steps):
            got: dict[int, list[Any]] = {}
            for rank in range(dp):
                for sample in range(self.sample + rank, self.sample + self.batch, dp):
                    got[sample] = self._pieces(self.stream, sample)
            for sample in sorted(got):
                self.model.train()
                assert got[sample] == self.model.trained[sample], sample
            self.sample += self.batch

    def _pieces(self, stream: Stream, sample: int) -> list[Any]:
        rows = stream.plan(sample, sample + 1).table.tolist()
        names = [source.name for source in stream.config.sources]
        assert all(document == self.model.document(names[s], p) for s, p, document, _, _ in rows)
        return [(names[source], position, offset, length) for source, position, _, offset, length in rows]

    def save(self) -> None:
        state = self.stream.state_at(self.sample, batches=self.schedule.until(self.sample))
        state = StreamState.from_json(state.to_json())
        self._compare(state)
        self.saves.append((self.sample, state, copy.deepcopy(self.model), copy.deepcopy(self.config), dict(self.first)))

    def _compare(self, state: StreamState) -> None:
        names = list(state.sources)

        def pieces(segments: tuple[Segment, ...]) -> list[Any]:
            return [(names[s.source], s.position, s.offset, s.length) for s in segments]

        assert [(b.opened_at, pieces(b.segments)) for b in state.bins] == self.model.bins
        assert pieces(state.pending) == self.model.pending
        assert pieces(state.tails) == self.model.waits + self.model.tails
        assert state.reached == self.model.closed
        for name, cursor in state.sources.items():
            gone = [p for p in self.model.left_out if p[0] == name]
            assert cursor.left_out_tokens == sum(p[3] for p in gone)
            assert cursor.left_out_documents == sum(p[2] == 0 for p in gone)
            assert cursor.position == self.model.positions.get(name, 0)

    def kill(self) -> None:
        """Back to the last save, or the one before."""
        which = self.data.draw(st.sampled_from([-1, -2] if len(self.saves) > 1 else [-1]))
        if which == -2:
            self.saves.pop()
        self.sample, state, model, config, first = self.saves[-1]
        self.model, self.config, self.first = copy.deepcopy(model), copy.deepcopy(config), dict(first)
        self.schedule = BatchSchedule.constant(self.batch).resumed(state.batches, self.sample)
        self.stream = self._open(state)
        assert self.stream.accepted == ()

    def change(self) -> None:
        """Save, change something, resume."""
        self.save()
        before, names = copy.deepcopy((self.config, self.first, self.model)), list(self.config["sources"])
        kind = self.data.draw(
            st.sampled_from(
                [
                    "weights",
                    "add",
                    "remove",
                    "rename",
                    "reorder",
                    "length",
                    "packing",
                    "filler",
                    "batch",
                    "samples",
                    "documents",
                ]
            )
        )
        getattr(self, f"_{kind}")(names)
        state = self.saves[-1][1]
        self.schedule = BatchSchedule.constant(self.batch).resumed(state.batches, self.sample)
        try:
            self.stream = self._open(state)
        except StateError as error:
            assert kind == "remove" and "cannot be removed yet" in error.headline
            self.config, self.first, self.model = before
            self.stream = self._open(state)

    def _stage(self) -> None:
        fillers = {self.first[name] for name, entry in self.config["sources"].items() if "packing" in entry}
        self.model.begin_stage(self._shares(), self.config["packing"], self.config["seq_length"], fillers)

    def _weights(self, names: list[str]) -> None:
        before = self._shares()
        for name in names:
            self.config["sources"][name]["weight"] = self.data.draw(st.sampled_from([1, 2, 5]))
        after = self._shares()
        if any(before[n] * sum(after.values()) != after[n] * sum(before.values()) for n in after):
            self._stage()

    def _reorder(self, names: list[str]) -> None:
        self.config["sources"] = {name: self.config["sources"][name] for name in self.data.draw(st.permutations(names))}

    def _add(self, names: list[str]) -> None:
        known = set(self.model.order)
        for name in LENGTHS:
            if name not in known:
                fills = FILLS if self.fills and self.data.draw(st.booleans()) else {}
                self.config["sources"][name] = {"weight": self.data.draw(st.integers(1, 3))} | fills
                self.first[name] = name
                self._stage()
                return

    def _remove(self, names: list[str]) -> None:
        if len(names) > 1:
            name = self.data.draw(st.sampled_from(names))
            was = self.first[name]
            if self.config["skip"]["documents"].pop(name, None):
                self.model.masked.pop(was, None)
            if sum(e["weight"] for n, e in self.config["sources"].items() if n != name):
                del self.config["sources"][name]
                self._stage()

    def _rename(self, names: list[str]) -> None:
        name = self.data.draw(st.sampled_from(names))
        new = f"{name}x{len(self.saves)}"
        sources = {}
        for old, entry in self.config["sources"].items():
            rest = {key: value for key, value in entry.items() if key != "was"}
            sources[new if old == name else old] = rest | {"was": name} if old == name else rest
        self.config["sources"] = sources
        documents = self.config["skip"]["documents"]
        if name in documents:
            documents[new] = documents.pop(name)
        self.first[new] = self.first.pop(name)

    def _length(self, names: list[str]) -> None:
        length = self.data.draw(st.sampled_from([8, 16, 24]))
        if length != self.config["seq_length"]:
            self.config["seq_length"] = length
            self._stage()

    def _packing(self, names: list[str]) -> None:
        packing = self._any_packing()
        if packing != self.config["packing"]:
            self.config["packing"] = packing
            self._stage()

    def _filler(self, names: list[str]) -> None:
        """A source that filled is whole from here on, or the other way round."""
        if self.fills:
            source = self.config["sources"][self.data.draw(st.sampled_from(names))]
            if source.pop("packing", None) is None:
                source |= FILLS
            self._stage()

    def _batch(self, names: list[str]) -> None:
        self.batch = self.data.draw(st.sampled_from([4, 8]))

    def _samples(self, names: list[str]) -> None:
        """Before, around, behind the resume point."""
        first = max(self.model.closed + self.data.draw(st.integers(-6, 12)), 0)
        stop = first + self.data.draw(st.integers(1, 9))
        self.config["skip"]["samples"].append(f"{first}:{stop}")
        self.model.skip(first, stop)

    def _documents(self, names: list[str]) -> None:
        name = self.data.draw(st.sampled_from(names))
        if name not in self.config["skip"]["documents"]:
            num = len(LENGTHS[self.first[name]])
            ids = self.data.draw(st.lists(st.integers(0, num - 1), min_size=1, max_size=2, unique=True))
            self.config["skip"]["documents"][name] = ids
            self.model.mask(self.first[name], ids)
        else:
            del self.config["skip"]["documents"][name]
            del self.model.masked[self.first[name]]


def _go_through(data: st.DataObject, num: int) -> None:
    run = Run(data)
    for _ in range(num):
        run.train(data.draw(st.integers(0, 4)))
        what = data.draw(st.sampled_from(["change", "change", "change", "save", "kill"]))
        getattr(run, what)()
    run.train(5)
    run.save()
    run.model.check()
    # All of it once more, from sample 0, as the last state tells it.
    last = run.saves[-1][1]
    again = Stream(
        StreamConfig.from_dict(last.config),
        [LengthList(LENGTHS[name]) for name in last.sources],
        past=last,
    )
    for sample in range(run.sample):
        assert run._pieces(again, sample) == run.model.trained[sample]
    found = again.state_at(run.sample)
    assert (found.digest, found.sources, found.bins, found.pending) == (
        last.digest,
        last.sources,
        last.bins,
        last.pending,
    )
    # And whatever was read ahead, from the last state on.
    ahead = [run._pieces(run.stream, k) for k in range(run.sample, run.sample + 20)]
    resumed = run._open(last)
    assert [run._pieces(resumed, k) for k in range(run.sample, run.sample + 20)] == ahead
    assert SkipConfig.from_dict(run.config["skip"]).samples == SkipConfig.from_dict(last.config.get("skip")).samples


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_sequence_of_changes(data: st.DataObject) -> None:
    _go_through(data, 6)


@release(
    "600 examples of 14 changes",
    "`::test_any_sequence_of_changes`",
)
@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_many_long_sequences_of_changes(data: st.DataObject) -> None:
    _go_through(data, 14)
