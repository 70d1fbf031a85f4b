"""One target in a process of its own: ``python -m tests.fuzz.child NAME CORPUS FINDINGS SECONDS SEED``.

Exit status 0: nothing was found in so many seconds of processor time. Otherwise a traceback on standard error, and the
input that it came from in FINDINGS.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(include=["megaresume", "tests.fuzz.targets"]):
    from tests.fuzz.targets import TARGETS

#: Longer for one input: a hang.
TIMEOUT = 15


def main(name: str, corpus: str, findings: str, seconds: str, seed: str) -> None:
    """Fuzz until the time is up. Does not return."""
    target = TARGETS[name]
    for k, data in enumerate(target.seeds()):
        Path(corpus, f"seed-{k}").write_bytes(data)
    runs, began, limit = 0, time.process_time(), float(seconds)

    def one(data: bytes) -> None:
        nonlocal runs
        runs += 1
        target.check(data)
        if time.process_time() - began > limit:
            print(f"{name}: {runs} runs", flush=True)
            os._exit(0)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = Random(seed)
        changed = target.mutate(data, rng) if target.mutate is not None and rng.randrange(2) else None
        if changed is not None and len(changed) <= max_size:
            return changed
        return bytes(atheris.Mutate(data, max_size))

    longest = max(map(len, target.seeds()))
    flags = [f"-seed={seed}", f"-artifact_prefix={findings}/{name}-", f"-timeout={TIMEOUT}", "-rss_limit_mb=4096"]
    atheris.Setup(
        [sys.argv[0], *flags, "-verbosity=0", f"-max_len={2 * longest + 64}", corpus],
        one,
        **({} if target.mutate is None else {"custom_mutator": mutate}),
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
