"""Fuzz every file that megaresume reads, guided by coverage (atheris, libFuzzer).

    python -m tests.fuzz --seconds 3600              an hour of processor time, shared by all targets
    python -m tests.fuzz --seconds 600 --only idx    one target
    python -m tests.fuzz --try FILE --only idx       a finding once more, without the fuzzer

A finding stops its target; its input is kept in --findings. A fixed one belongs in tests/fuzz/findings/TARGET/.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.target import SCRATCH, in_memory

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one target."""

    name: str
    status: int
    #: its standard output and error.
    text: str


def fuzz(name: str, *, seconds: float, findings: Path, seed: int, corpus: Path | None = None) -> Outcome:
    """Fuzz one target for so many seconds of processor time, in a child.

    Args:
        name: of the target.
        seconds: of the child, without its start.
        findings: directory for inputs that show a fault.
        seed: of the fuzzer.
        corpus: directory of inputs to go on from, and to add to; None: nothing is kept.
    """
    with (
        tempfile.TemporaryDirectory(prefix="megaresume-corpus-") as temporary,
        tempfile.TemporaryDirectory(prefix="megaresume-fuzz-", dir=in_memory()) as files,
    ):
        command = [sys.executable, "-m", "tests.fuzz.child", name, str(corpus or temporary), str(findings)]
        done = subprocess.run(
            [*command, str(seconds), str(seed)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MEGARESUME_CACHE": temporary, SCRATCH: files},
        )
    return Outcome(name=name, status=done.returncode, text=done.stdout.decode(errors="replace"))


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 if anything was found."""
    from tests.fuzz.targets import PLANTED, TARGETS

    names = [name for name in TARGETS if name not in PLANTED]
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of processor time in all (default: 60)")
    parser.add_argument("--only", action="append", choices=list(TARGETS), help="one target; may be repeated")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="where inputs are kept")
    parser.add_argument("--corpus", type=Path, help="directory of what was learnt: to go on from, and to add to")
    parser.add_argument("--seed", type=int, default=random.randrange(1, 1 << 31))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="targets at the same time")
    parser.add_argument("--try", dest="file", type=Path, help="run the target of --only on this file, once")
    args = parser.parse_args(argv)
    if args.file is not None:
        for name in args.only or names:
            TARGETS[name].check(args.file.read_bytes())
        return 0
    chosen = args.only or names
    args.findings.mkdir(parents=True, exist_ok=True)

    def one(name: str) -> Outcome:
        corpus = None if args.corpus is None else args.corpus / name
        if corpus is not None:
            corpus.mkdir(parents=True, exist_ok=True)
        share = args.seconds / len(chosen)
        outcome = fuzz(name, seconds=share, findings=args.findings.absolute(), seed=args.seed, corpus=corpus)
        print(outcome.text.strip() if outcome.status == 0 else f"{name}: FOUND\n{outcome.text[-4000:]}", flush=True)
        return outcome

    print(f"seed {args.seed}", flush=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        outcomes = list(pool.map(one, chosen))
    return 1 if any(outcome.status for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
