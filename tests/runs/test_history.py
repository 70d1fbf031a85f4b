"""The work of reading a history grows with its length, however often the run was started."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaresume.checkpoint.records.branches import abandoned_checkpoints
from megaresume.checkpoint.records.ledger import LedgerEntry, LedgerReading
from megaresume.checkpoint.system import Topology
from megaresume.runs.history import _topologies
from megaresume.runs.losses import read_losses
from megaresume.runs.rank_steps import read_rank_steps

STARTS = 3000


class Compared(int):
    """A number that counts how often one of its kind is compared with another by size."""

    times = 0

    def _count(self, answer: bool) -> bool:
        Compared.times += 1
        return answer

    def __lt__(self, other: int) -> bool:
        return self._count(int(self) < int(other))

    def __gt__(self, other: int) -> bool:
        return self._count(int(self) > int(other))

    def __le__(self, other: int) -> bool:
        return self._count(int(self) <= int(other))

    def __ge__(self, other: int) -> bool:
        return self._count(int(self) >= int(other))

    def __neg__(self) -> Compared:
        return Compared(-int(self))


def entry(kind: str, step: int, dp: int) -> LedgerEntry:
    return LedgerEntry(
        kind=kind,  # type: ignore[arg-type]
        iteration=Compared(step),
        tag=f"global_step{step}",
        samples=Compared(8 * step),
        digest="0" * 16,
        run="a" * 16,
        time="2025-01-01T00:00:00.000Z",
        topology=Topology(dp=dp),
    )


def test_a_ledger_of_many_starts() -> None:
    entries: list[LedgerEntry] = []
    for step in range(STARTS):
        entries += [entry("start", step, 1 + step % 2), entry("checkpoint", step + 1, 1 + step % 2)]
    Compared.times = 0
    ledger = LedgerReading(entries=tuple(entries))
    assert not abandoned_checkpoints(ledger.entries)
    assert len(_topologies(ledger, [])) == STARTS
    assert 0 < Compared.times < 100 * STARTS


def test_an_end_lays_nothing_out() -> None:
    entries = (entry("start", 0, 2), entry("checkpoint", 4, 2), entry("finished", 4, 2), entry("start", 4, 1))
    entries += (entry("finished", 4, 1), entry("start", 4, 4), entry("checkpoint", 8, 4))
    assert _topologies(LedgerReading(entries=entries), []) == [(0, Topology(dp=2)), (32, Topology(dp=4))]


def test_a_checkpoint_that_becomes_durable_after_the_next_start_lays_nothing_out() -> None:
    """It was given up: the process that went on from the one before it forces it to the disk, and says so."""
    entries = (entry("start", 0, 2), entry("checkpoint", 2, 2), entry("checkpoint", 4, 2))
    entries += (entry("start", 2, 1), entry("durable", 4, 2), entry("checkpoint", 4, 1), entry("durable", 4, 1))
    assert _topologies(LedgerReading(entries=entries), []) == [(0, Topology(dp=2)), (16, Topology(dp=1))]


def test_a_log_of_many_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaresume.runs.losses.int", Compared, raising=False)
    log = tmp_path / "log"
    log.write_text(
        "".join(
            f'{{"event": "start", "step": {step}}}\n{{"event": "step", "step": {step + 1}, "loss_hex": "0x1p0"}}\n'
            for step in range(STARTS)
        )
    )
    Compared.times = 0
    read = read_losses(log)
    assert list(read.steps) == list(range(1, STARTS + 1)) and read.restarts[-1] == (STARTS - 1, 0)
    assert 0 < Compared.times < 100 * STARTS


def test_a_step_of_any_number_in_a_log_of_samples(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    line = '{{"event": "step", "step": {}, "samples": [0, 8], "order": "0000000000000000"}}\n'
    log.write_text('{"event": "start", "step": 0, "samples": 0}\n' + line.format(3) + line.format(10**15))
    read = read_rank_steps(log)
    assert list(read.steps) == [3, 10**15] and read.gaps[:4] == (1, 2, 4, 5) and len(read.gaps) < 20_000
