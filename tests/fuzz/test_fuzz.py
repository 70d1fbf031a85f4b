"""Every file that megaresume reads, under a fuzzer guided by coverage, for a fixed budget; and what it once found."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fuzz.__main__ import ROOT, fuzz
from tests.fuzz.targets import PLANTED, TARGETS
from tests.release import release

FINDINGS = Path(__file__).with_name("findings")
#: processor time of one target, without its start.
SECONDS = 1.5
NAMES = [name for name in TARGETS if name not in PLANTED]
KEPT = sorted(path for path in FINDINGS.glob("*/*"))


@release(
    "half a minute of every parser",
    "`::test_what_was_found_once`, `::test_seeds`",
)
@pytest.mark.process
def test_nothing_is_found(tmp_path: Path) -> None:
    """No crash, no hang, no damaged file that passes for another one."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(lambda name: fuzz(name, seconds=SECONDS, findings=tmp_path, seed=1), NAMES))
    found = [f"{outcome.name}:\n{outcome.text[-4000:]}" for outcome in outcomes if outcome.status]
    assert not found, f"try one again: python -m tests.fuzz --only NAME --try FILE (in {tmp_path})\n" + "\n".join(found)
    assert all("runs" in outcome.text for outcome in outcomes)


@pytest.mark.process
def test_a_fault_is_found(tmp_path: Path) -> None:
    """The fuzzer itself works: it gets behind three conditions, and keeps what it found."""
    outcome = fuzz("planted-fault", seconds=20, findings=tmp_path, seed=1)
    assert outcome.status != 0 and "ZeroDivisionError: planted" in outcome.text
    (kept,) = tmp_path.iterdir()
    with pytest.raises(ZeroDivisionError):
        TARGETS["planted-fault"].check(kept.read_bytes())


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_was_found_once(path: Path) -> None:
    """Inputs that were a crash, a hang or a wrong answer before."""
    TARGETS[path.parent.name].check(path.read_bytes())


@pytest.mark.parametrize("name", NAMES)
def test_seeds(name: str) -> None:
    """The seeds and some mutations of each, without the fuzzer."""
    from random import Random

    target, rng = TARGETS[name], Random(1)
    for data in target.seeds():
        target.check(data)
        for _ in range(5 if target.mutate is not None else 0):
            assert target.mutate is not None
            changed = target.mutate(data, rng)
            if changed is not None:
                target.check(changed)


def test_findings_belong_to_targets() -> None:
    assert ROOT.joinpath("tests/fuzz/findings") == FINDINGS
    assert KEPT and {path.parent.name for path in KEPT} <= set(NAMES)
