"""Blends whose sources grow, pause, end, go and come back: every document is trained as often as its epochs say.

Who counts reads the numbers of the documents in the plan, and nothing else. Documents are short and whole, and each
source ends after `EPOCHS`, so that all of it can be counted.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import StateError, StreamExhausted
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList
from tests.release import release

EPOCHS = 2
PACKINGS = ["best_fit", "none", {"mode": "best_fit", "open_bins": 2, "max_age": 3}]


class Run:
    """A run that is resumed with another config again and again, and who counts what it trained."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.documents = {"a": 9, "b": 7}
        self.config: dict[str, Any] = {
            "seed": data.draw(st.integers(0, 9)),
            "seq_length": 8,
            "packing": data.draw(st.sampled_from(PACKINGS)),
            "sources": {name: {"weight": 1, "max_epochs": EPOCHS} for name in self.documents},
        }
        self.sample, self.trained = 0, Counter[tuple[str, int]]()
        #: (source, document) -> how often it is to be trained.
        self.expected = {(name, d): EPOCHS for name, n in self.documents.items() for d in range(n)}
        #: (source, epoch in which it grew) -> the first document that waits for the next epoch.
        self.waiting: dict[tuple[str, int], int] = {}
        self.stream = self._open(None)

    def _open(self, state: StreamState | None) -> Stream:
        config = StreamConfig.from_dict(self.config)
        sources = [LengthList([1 + d % 7 for d in range(self.documents[s.label])]) for s in config.sources]
        return Stream(config, sources, state=state, on_change="stage")

    def train(self, samples: int) -> bool:
        """So many more; returns whether the stream goes on."""
        for _ in range(samples):
            try:
                rows = self.stream.plan(self.sample, self.sample + 1).table.tolist()
            except StreamExhausted:
                return False
            names = [source.name for source in self.stream.config.sources]
            self.trained.update((names[source], document) for source, _, document, _, _ in rows)
            self.sample += 1
        return True

    def state(self) -> StreamState:
        state = self.stream.state_at(self.sample)
        self.stream.read_back(state)
        return StreamState.from_json(state.to_json())

    def change(self) -> None:
        """Another config or more documents, and a resume; what is refused by name changes nothing."""
        state, before = self.state(), copy.deepcopy((self.config, self.documents, self.expected, self.waiting))
        self.config.pop("stages", None)
        for source in self.config["sources"].values():
            source.pop("append", None)
        kind = self.data.draw(st.sampled_from(["weights", "grow", "grow", "stage", "remove", "add"]))
        said = getattr(self, f"_{kind}")(state)
        try:
            stream = self._open(state)
        except StateError as error:
            assert "cannot be removed yet" in error.headline, error
            self.config, self.documents, self.expected, self.waiting = before
            stream = self._open(state)
        else:
            assert said is None or any(said in line for line in stream.accepted), (said, stream.accepted)
        self.stream = stream

    def _weights(self, _: StreamState) -> None:
        sources = list(self.config["sources"].values())
        for source in sources:
            source["weight"] = self.data.draw(st.sampled_from([0, 1, 3]))
        if not any(source["weight"] for source in sources):
            sources[0]["weight"] = 1

    def _grow(self, state: StreamState) -> str:
        name = self.data.draw(st.sampled_from(sorted(self.config["sources"])))
        append = self.data.draw(st.sampled_from(["now", "next_epoch"]))
        self.config["sources"][name]["append"] = append
        first, self.documents[name] = self.documents[name], self.documents[name] + self.data.draw(st.integers(1, 5))
        cursor, paused = state.sources[name], not self.config["sources"][name]["weight"]
        begun = bool(cursor.eras) and cursor.left < cursor.size
        epoch = cursor.epoch + (append == "next_epoch" and begun)
        ended = bool(cursor.eras) and cursor.epoch >= EPOCHS
        times = 0 if ended else max(EPOCHS - epoch, 0)
        if (name, epoch) in self.waiting and append == "now":
            first = self.waiting[name, epoch]  # those that were to come with the next epoch come at once, too
        elif append == "next_epoch" and begun:
            self.waiting.setdefault((name, cursor.epoch), first)
        self.expected |= {(name, d): times for d in range(first, self.documents[name])}
        if not times:
            return "do not come: max_epochs 2"
        if paused:
            return "when it is drawn again"
        return "at once" if append == "now" or not begun else "from its next epoch on"

    def _stage(self, _: StreamState) -> None:
        """One that pauses a source, and one that brings it back."""
        names = sorted(self.config["sources"])
        paused = self.data.draw(st.sampled_from(names))
        at = max(self.sample, 1) + self.data.draw(st.integers(0, 4))
        if len(names) > 1:
            self.config["stages"] = [
                {"from_samples": at, "weights": {name: int(name != paused) for name in names}},
                {"from_samples": at + self.data.draw(st.integers(1, 5)), "weights": dict.fromkeys(names, 1)},
            ]

    def _remove(self, _: StreamState) -> None:
        names = sorted(self.config["sources"])
        if len(names) > 1:
            gone = self.data.draw(st.sampled_from(names))
            del self.config["sources"][gone]
            if not any(source["weight"] for source in self.config["sources"].values()):
                next(iter(self.config["sources"].values()))["weight"] = 1
            if self.data.draw(st.booleans()):
                self._stage(_)

    def _add(self, _: StreamState) -> None:
        """One that was gone, or a new one."""
        for name in ("a", "b", "c"):
            if name not in self.config["sources"]:
                self.config["sources"][name] = {"weight": 1, "max_epochs": EPOCHS}
                if name not in self.documents:
                    self.documents[name] = 5
                    self.expected |= {(name, d): EPOCHS for d in range(5)}
                return

    def finish(self) -> None:
        """All sources to their end."""
        self.config.pop("stages", None)
        self.config["sources"] = {name: {"weight": 1, "max_epochs": EPOCHS} for name in self.documents}
        self.stream = self._open(self.state())
        while self.train(50):
            pass
        wrong = {key: (self.trained[key], n) for key, n in self.expected.items() if self.trained[key] != n}
        assert wrong == {}


def _go_through(data: st.DataObject, changes: int) -> None:
    run = Run(data)
    for _ in range(changes):
        if not run.train(data.draw(st.integers(0, 6))):
            break
        run.change()
    run.finish()


def _stream(
    sources: dict[str, dict[str, Any]], lengths: dict[str, list[int]], state: StreamState | None = None, **more: Any
) -> Stream:
    config = StreamConfig.from_dict({"seed": 1, "seq_length": 8, "packing": "split", "sources": sources} | more)
    given = [LengthList(lengths[source.label]) for source in config.sources]
    stream = Stream(config, given, state=state, on_change="stage")
    stream.read_back(stream.state_at(stream.start + 3))
    return stream


THREE = {"a": {"weight": 1}, "b": {"weight": 1}, "c": {"weight": 1}}
LENGTHS = {name: [3, 20, 9, 1, 30] for name in THREE}


def test_a_source_is_removed_while_stages_with_weights_are_to_come() -> None:
    state = _stream(THREE, LENGTHS).state_at(6)
    two = {name: THREE[name] for name in ("a", "b")}
    stages = [{"from_samples": 12, "weights": {"a": 1, "b": 3}}]
    going_on = _stream(two, LENGTHS, state, stages=stages)
    before, after = (StreamState.from_json(going_on.state_at(sample).to_json()) for sample in (9, 15))
    for saved in (before, after):
        again = _stream(two, LENGTHS, saved, stages=stages)
        assert again.accepted == ()
        assert again.digest_at(30) == going_on.digest_at(30)
    assert after.stages[-1].config["sources"]["c"]["weight"] == 0


def test_a_source_that_grew_at_once_is_removed() -> None:
    state = _stream(THREE, LENGTHS).state_at(6)
    longer = LENGTHS | {"c": [*LENGTHS["c"], 11, 25]}
    grown = _stream(THREE | {"c": {"weight": 1, "append": "now"}}, longer, state)
    # Of what is to go, nothing may wait.
    state = next(s for s in map(grown.state_at, range(8, 60)) if all(w.source != 2 for w in s.waiting))
    _stream({name: THREE[name] for name in ("a", "b")}, LENGTHS, state).state_at(state.samples + 20)


def test_a_source_that_has_ended_pauses_and_comes_back_with_a_list_of_documents_to_skip() -> None:
    sources = {"a": {"weight": 1}, "b": {"weight": 1, "max_epochs": 1}}
    more = {"skip": {"documents": {"b": [1]}}}
    state = _stream(sources, LENGTHS, **more).state_at(60)
    assert state.sources["b"].exhausted
    for weight in (0, 1):
        stream = _stream(sources | {"b": {"weight": weight, "max_epochs": 1}}, LENGTHS, state, **more)
        state = stream.state_at(state.samples + 5)
    assert state.sources["b"].position == stream.base_state.sources["b"].position  # type: ignore[union-attr]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_document_as_often_as_its_epochs_say(data: st.DataObject) -> None:
    _go_through(data, 5)


@release(
    "3,000 examples of 12 changes",
    "`::test_every_document_as_often_as_its_epochs_say`",
)
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_many_more(data: st.DataObject) -> None:
    _go_through(data, 12)
