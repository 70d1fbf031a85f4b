"""Runs that copy to a real S3 server, killed, stopped and lied to at any request: ``python -m
tests.checkpoint.store.tries --count 2000``; ``--server seaweedfs`` names another one, ``--server gcs`` one that is not
S3 (`emulators`), ``--local`` files that fsspec serves as a store.

A **life** is one run: start, look at both storages, bring what is newest, save, copy, end. A start of it is killed at a
request (before the server has it, or when it has done it), or a request goes wrong; then its disk stays or is lost, and
it starts again. After every start the bucket is judged (`recorder`): what counts is whole, and never becomes older.

A **duel** is two writers: one is stopped at a request, another takes over from an empty disk, saves and copies; then
the first one goes on. It may neither move a pointer nor damage what the other one has saved.

Each start is a fork of this process, which has imported everything, and opens no store itself.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import gc
import itertools
import json
import logging
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3  # noqa: F401  before the forks
import fsspec
import s3fs  # noqa: F401

from megaresume.checkpoint.copies import stager
from megaresume.checkpoint.copies.session_copies import Staged
from megaresume.checkpoint.load.choose import choose, choose_of_two
from megaresume.checkpoint.save.retention import Retention
from megaresume.checkpoint.starts import record_start
from megaresume.checkpoint.store import lease, store, threads  # noqa: F401
from megaresume.data import remote
from megaresume.stream.errors import CheckpointError, MegaresumeError
from tests.checkpoint.conftest import MODEL, OPTIM, make_state, save_checkpoint
from tests.checkpoint.store.emulators import EMULATORS
from tests.checkpoint.store.recorder import Bucket, Folder, Lost
from tests.checkpoint.store.server import SERVERS, Proxied, keep_descriptions
from tests.forked import freeze

KILLS = ("kill before", "kill after")
STOPS = ("stop before", "stop after")
WRONG = ("503", "403", "reset before", "reset after", "torn", "flipped answer", "flipped body")
#: bytes; of a file of 1024 there are three.
PART = 400
#: the exit status of a start that was refused.
REFUSED = 3


def content(digest: str) -> dict[str, bytes]:
    """What `save_checkpoint` writes."""
    return dict.fromkeys((MODEL, OPTIM), digest.encode() * 64)


class World:
    """A server, a proxy in front of it that does harm, and a disk.

    Args:
        server: its name.
    """

    def __init__(self, server: str) -> None:
        keep_descriptions()
        self.server = SERVERS[server]()
        self.proxy = Proxied(self.server)
        os.environ.update(self.server.environment)
        os.environ["AWS_ENDPOINT_URL"] = self.proxy.url
        self.client = self.server.client()
        self.disk = _disk()
        gc.collect()
        freeze()

    def close(self) -> None:
        self.proxy.close()
        self.server.close()
        shutil.rmtree(self.disk, ignore_errors=True)

    def place(self, prefix: str) -> tuple[str, Bucket]:
        """A URL, and what is there."""
        return f"s3://runs/{prefix}", Bucket(self.client, prefix)

    def harm(self) -> None:
        """In a process that begins: prepare for the plan."""
        store.PART = max(PART, self.server.least_part)

    def fork(self, function: Callable[..., None], *args: Any, **plan: Any) -> int:
        """A process that runs a function, to which the plan happens; its number."""
        ready, go = os.pipe()
        if not (pid := os.fork()):
            status = 1
            try:
                os.close(go)
                os.read(ready, 1)
                self.harm()
                sys.stdout = open(self.disk / "said", "a")  # noqa: SIM115
                logging.basicConfig(filename=self.disk / "log", level=logging.WARNING, force=True)
                function(*args)
                status = 0
            except CheckpointError as error:
                (self.disk / "refusal").write_text(str(error))
                status = REFUSED
            except MegaresumeError as error:
                (self.disk / "refusal").write_text(str(error))
                status = REFUSED + 1
            except BaseException:  # noqa: BLE001  the parent tells
                (self.disk / "error").write_text(traceback.format_exc())
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                os._exit(status)
        os.close(ready)
        self.proxy.plan(pid=pid, **plan)
        os.write(go, b"x")
        os.close(go)
        return pid

    def error(self) -> str:
        path = self.disk / "error"
        return path.read_text() if path.exists() else ""

    def refusal(self) -> str:
        path = self.disk / "refusal"
        return path.read_text() if path.exists() else ""


class LocalWorld(World):
    """A store of files, whose requests do harm to the process that makes them: a hundred times cheaper."""

    def __init__(self) -> None:
        self.disk = _disk()
        self.proxy = self  # type: ignore[assignment]

    def close(self) -> None:
        shutil.rmtree(self.disk, ignore_errors=True)

    def place(self, prefix: str) -> tuple[str, Bucket]:
        return f"local://{self.disk}/store/{prefix}", Folder(self.disk / "store" / prefix)

    def plan(self, **plan: Any) -> None:
        (self.disk / "plan").write_text(json.dumps(plan))
        (self.disk / "requests").write_text("")

    def requests(self) -> list[str]:
        return (self.disk / "requests").read_text().splitlines()

    def harm(self) -> None:
        store.PART = PART
        fsspec.config.conf["local"] = {"auto_mkdir": True}
        plan = json.loads((self.disk / "plan").read_text())
        log = os.open(self.disk / "requests", os.O_WRONLY | os.O_APPEND)
        fault, at, before = plan.get("fault", ""), plan.get("at"), remote.RemoteStore.tried
        numbers, one_at_a_time = itertools.count(1), threading.Lock()

        def strike(when: str) -> None:
            if fault == f"kill {when}":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == f"stop {when}":
                os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(0.2)  # all threads stop a little later, and files, other than objects, can be half-written
            if fault == f"reset {when}" or (fault == "503" and when == "before"):
                raise OSError(fault)
            if fault == "403" and when == "before":
                raise PermissionError("ExpiredToken")

        def tried(store: Any, url: str, what: str, call: Callable[[], Any], **more: Any) -> Any:
            def request() -> Any:
                with one_at_a_time:
                    number = next(numbers)
                    os.write(log, f"{what.split()[0]} {url}\n".encode())
                    if number == at:
                        strike("before")
                    found = call()
                    if number == at:
                        strike("after")
                    return found

            return before(store, url, what, request, **more)

        remote.RemoteStore.tried = tried  # type: ignore[method-assign]


class EmulatorWorld(LocalWorld):
    """The same of an emulator."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.emulator = EMULATORS[name]()
        os.environ.update(self.emulator.environment)

    def close(self) -> None:
        self.emulator.close()
        super().close()

    def place(self, prefix: str) -> tuple[str, Bucket]:
        return self.emulator.place(prefix)


def _disk() -> Path:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="megaresume-tries-", dir=memory))


def wait(pid: int) -> int:
    """Exit status; negative: the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_until_stopped(pid: int) -> bool:
    """False: it has ended before."""
    _, status = os.waitpid(pid, os.WUNTRACED)
    return os.WIFSTOPPED(status)


def start(local: Path, url: str, *, salt: int = 0, saves: int = 1, patience: float = 60.0) -> None:
    """What a session does with its storages."""
    remote.FIRST_WAIT, stager.FIRST_PAUSE, stager.LONGEST_PAUSE = 0.005, 0.01, 0.05
    lease.RENEW_SECONDS, lease.PATIENCE_SECONDS, lease._POLL_SECONDS = 0.3, patience, 0.05
    staged = Staged(str(local), url, Retention(keep_last=2))
    passed: dict[Path, str] = {}
    choice = staged.bring(lambda: choose_of_two(local, staged.shared, damaged=passed), passed, lambda: None)
    step = 0 if choice is None or choice.iteration is None else choice.iteration
    if choice is not None:
        check_local(local, step)
    staged.adopt(is_fresh=False)
    record_start(local, iteration=step, state=make_state(step * 8), choice=choice)
    staged.start()
    for _ in range(saves):
        step += 10
        save_checkpoint(local, step, checksums=True, salt=salt)
        staged.submit(step, f"global_step{step}")
    staged.close(120.0 if patience > 10 else 2.0)


def check_local(local: Path, step: int) -> None:
    """What was brought, or was there, holds what was saved."""
    found = choose(local, tag=f"global_step{step}", checksums=True)
    assert found is not None and found.digest is not None and found.iteration == step
    for name, data in content(found.digest).items():
        if (local / f"global_step{step}" / name).read_bytes() != data:
            raise Lost(f"{name} of step {step} is here with other bytes than were saved")


class Tries:
    """Makes lives and duels.

    Args:
        world: where.
        seed: of what happens.
    """

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.seed = world, seed
        self.random = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self._number = 0

    def _place(self) -> tuple[Path, str, Bucket]:
        self._number += 1
        prefix = f"run-{self.seed}-{self._number}"
        return self.world.disk / prefix, *self.world.place(prefix)

    def life(self, starts: int, faults: tuple[str, ...]) -> None:
        """One run of so many starts that something happens to."""
        local, url, bucket = self._place()
        best, longest, told = 0, 60, []
        for _ in range(starts):
            fault, at = self.random.choice(faults), self.random.randint(1, longest)
            for name in ("error", "refusal"):
                (self.world.disk / name).unlink(missing_ok=True)
            status = wait(self.world.fork(start, local, url, at=at, fault=fault))
            requests = self.world.proxy.requests()
            struck = requests[at - 1] if len(requests) >= at else "nothing"
            told.append(f"{fault} at {at} ({struck}): {status}")
            longest = max(20, min(len(requests) + 3, 150))
            try:
                best = self._judge(bucket, status, fault, best, struck)
            except Lost as error:
                raise Lost(f"seed {self.seed}, {url}: {'; '.join(told)}: {error}\n{self.world.error()}") from None
            self.counts[f"{fault}: {'nothing left to strike' if struck == 'nothing' else struck.split()[0]}"] += 1
            if self.random.random() < 0.4:
                shutil.rmtree(local, ignore_errors=True)
                if not best:  # nothing can be brought: another run
                    local, url, bucket = self._place()
        status = wait(self.world.fork(start, local, url))
        head = bucket.whole(content)
        if status or head is None or max(saved["iteration"] for saved in head["saves"]) < best + 10:
            said = self.world.refusal() or self.world.error()
            raise Lost(f"seed {self.seed}, {url}: {'; '.join(told)}: the last start ended with {status}: {said}")
        shutil.rmtree(local, ignore_errors=True)

    def _judge(self, bucket: Bucket, status: int, fault: str, best: int, struck: str) -> int:
        head = bucket.whole(content)
        steps = [0] if head is None else [saved["iteration"] for saved in head["saves"]] or [0]
        if max(steps) < best:
            raise Lost(f"step {best} counted, and now {max(steps)} is the newest")
        expected = {-signal.SIGKILL} if fault in KILLS and struck != "nothing" else {0}
        if fault == "403":
            expected = {0, REFUSED + 1}  # at its start, nothing is to be gained by another try
        if status not in expected:
            raise Lost(f"it ended with {status}: {self.world.refusal()}")
        if status == 0 and fault not in KILLS and head is not None and max(steps) < best + 10:
            raise Lost(f"it came to its end, and only step {max(steps)} is copied")
        return max(steps)

    def duel(self) -> None:
        """Two writers."""
        local, url, bucket = self._place()
        if wait(self.world.fork(start, local, url)):
            raise Lost(f"seed {self.seed}, {url}: {self.world.error() or self.world.refusal()}")
        fault, at = self.random.choice(STOPS), self.random.randint(1, 60)
        first = self.world.fork(functools.partial(start, salt=1, patience=5.0), local, url, at=at, fault=fault)
        is_stopped = wait_until_stopped(first)
        struck = self.world.proxy.requests()[at - 1] if is_stopped else "nothing"
        self.world.proxy.plan()
        other = local.with_name(f"{local.name}-other")
        status = wait(self.world.fork(functools.partial(start, salt=2, patience=1.0), other, url))
        where = f"seed {self.seed}, {url}: {fault} at {at} ({struck})"
        if status:
            raise Lost(f"{where}: the second one ended with {status}: {self.world.error() or self.world.refusal()}")
        before, keys = bucket.whole(content), bucket.keys()
        assert before is not None
        if is_stopped:
            os.kill(first, signal.SIGCONT)
            if (status := wait(first)) not in (0, REFUSED):
                raise Lost(f"{where}: the first one ended with {status}: {self.world.error() or self.world.refusal()}")
        after = bucket.whole(content)
        assert after is not None
        if after["epoch"] > before["epoch"]:  # it had not got as far as its claim, and comes after one that has ended
            struck = "before its claim"
            if max(saved["iteration"] for saved in after["saves"]) <= max(s["iteration"] for s in before["saves"]):
                raise Lost(f"{where}: the next writer did not begin where the one before it had ended: {after}")
        elif after != before:
            raise Lost(f"{where}: the first one, which had lost the store, has changed what counts: {after}")
        # The marker of what it had committed before it lost the store is its own.
        if after["epoch"] > before["epoch"]:
            keys = {}
        # Nor are heads below the newest one, which are past.
        mine = re.compile(r".+\.saving\.json|megaresume/heads/.+")
        if missing := sorted(name for name in set(keys) - set(bucket.keys()) if not mine.fullmatch(name)):
            raise Lost(f"{where}: the first one, which had lost the store, has deleted {missing}")
        self.counts[f"{fault}: {struck.split()[0]}"] += 1
        for root in (local, other):
            shutil.rmtree(root, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="starts that something happens to")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--duels", type=float, default=0.15, help="share of duels")
    parser.add_argument("--server", choices=[*SERVERS, *EMULATORS], default="moto")
    parser.add_argument("--local", action="store_true", help="on a store of files, without the faults of a network")
    args = parser.parse_args()
    world = LocalWorld() if args.local else (EmulatorWorld if args.server in EMULATORS else World)(args.server)
    faults = (*KILLS, *KILLS, *(WRONG[:4] if isinstance(world, LocalWorld) else WRONG))
    tries, began = Tries(world, args.seed), time.monotonic()
    try:
        while tries.counts.total() < args.count:
            if tries.random.random() < args.duels:
                tries.duel()
            else:
                tries.life(5, faults)
            if tries.counts.total() % 20 < 5:
                print(f"{tries.counts.total()} tries, {time.monotonic() - began:.0f} s", flush=True)
    finally:
        world.close()
    for name, count in sorted(tries.counts.items()):
        print(f"{count:6} {name}")
    print(f"{tries.counts.total()} tries, 0 lost", flush=True)


if __name__ == "__main__":
    main()
