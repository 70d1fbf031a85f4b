"""Runs on machines that share no disk, killed at any time: ``python -m tests.checkpoint.store.nodes --count 150``.

A node is a process with a directory of its own; torch.distributed connects them, and a real S3 server is all that they
have in common. The weights of a step are its number, so whoever knows the step knows every byte of every tensor: what
is in the bucket is fetched with boto3 and opened by torch alone, and each number is compared.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import importlib
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import boto3
import numba  # noqa: F401
import s3fs  # noqa: F401
import torch
import torch._dynamo  # before the forks, as numba
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import megaresume
import megaresume.hosts.loop
import megaresume.stream.stream
from megaresume.checkpoint.copies import stager, store_place
from megaresume.checkpoint.store import lease, store
from megaresume.cluster.processes import free_port
from megaresume.data import remote
from megaresume.stream.errors import CheckpointError, MegaresumeError
from tests.checkpoint.store.recorder import Bucket, Lost
from tests.checkpoint.store.server import Proxied, Server, keep_descriptions
from tests.forked import freeze

BATCH, ITEMS, WIDTH = 12, 1200, 24
REFUSED, STOPPED = 3, 9
#: what a proxy does at a request; see proxy.py.
FAULTS = ("kill before", "kill after", "503", "reset before", "reset after", "torn", "flipped answer", "flipped body")


class Numbers(torch.utils.data.Dataset[Any]):
    """Item i is i."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([i])


class Weights(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(WIDTH, 40))
        self.second = torch.nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first.sum() + self.second.sum() + 0 * x.sum()


class Counting(torch.optim.SGD):
    """Every weight is the number of steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(group["lr"])  # which torch sets to 0 where it only makes its state


def train(
    rank: int,
    disk: Path,
    url: str,
    steps: int,
    record: Path,
    pause: float,
    save_every: int,
    position_every: int | None,
    die: int | None,
) -> None:
    """One rank: the loop of docs/torch.md, and what it sees, written down. ``die``: after so many steps, once the
    bucket tells of them."""
    store.PART, store.MOST_PARTS = 2000, 10_000
    remote.FIRST_WAIT, stager.FIRST_PAUSE, stager.LONGEST_PAUSE = 0.01, 0.05, 0.2
    lease.RENEW_SECONDS, lease.PATIENCE_SECONDS, lease._POLL_SECONDS = 0.3, 60.0, 0.05
    store_place.PART_POLL = 0.05
    ranks = dist.get_world_size()
    model = Weights()
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = Counting(model.parameters(), lr=1.0)
    loader = megaresume.DataLoader(Numbers(), batch_size=BATCH // ranks)
    where = megaresume.Checkpoints(save_dir=disk, stage_to=url, keep_last=2, position_every=position_every)
    objects = {"model": model, "optimizer": optimizer}
    loop = megaresume.attach(objects, loader, checkpoints=where, stop=megaresume.StopConditions())
    loop.load()
    with open(record / f"rank_{rank}", "a", buffering=1) as lines:
        told = {"start": loop.step, "weights": sorted({float(v) for v in model.first.detach().full_tensor().flatten()})}
        lines.write(json.dumps(told) + "\n")
        while loop.step < steps:
            for batch in loop:
                if loop.step == die and is_told(url, loop.step):
                    os.kill(os.getpid(), signal.SIGKILL)
                model(batch.float()).backward()
                optimizer.step()
                optimizer.zero_grad()
                lines.write(json.dumps({"step": loop.step + 1, "items": batch.flatten().tolist()}) + "\n")
                loop.stepped()
                time.sleep(pause)
                lines.write(json.dumps({"done": loop.step, "time": time.time()}) + "\n")
                if loop.step % save_every == 0:
                    loop.save()
                    lines.write(json.dumps({"saved": loop.step, "time": time.time()}) + "\n")
                if loop.step == steps:
                    break
    loop.close()


def is_told(url: str, step: int) -> bool:
    """Once the bucket has the newest checkpoint, and a position of this step. Read with boto3."""
    client = boto3.client("s3")
    prefix = f"{url.removeprefix('s3://runs/')}/megaresume/"

    def newest(kind: str) -> dict[str, Any]:
        found = client.list_objects_v2(Bucket="runs", Prefix=f"{prefix}{kind}/").get("Contents", ())
        names = [one["Key"] for one in found]
        return json.loads(client.get_object(Bucket="runs", Key=max(names))["Body"].read()) if names else {}

    while newest("position").get("iteration") != step or not newest("heads").get("saves"):
        time.sleep(0.05)
    return True


def _life(rank: int, ranks: int, port: int, said: Path, *args: Any) -> None:
    status = 1
    with open(said / f"rank_{rank}.log", "a") as log:
        sys.stdout = sys.stderr = log
        logging.basicConfig(stream=log, level=logging.WARNING, force=True)
        try:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
            train(rank, *args)
            dist.barrier()
            status = 0
        except megaresume.Stopped:
            status = STOPPED
        except CheckpointError:
            traceback.print_exc()
            status = REFUSED
        except MegaresumeError:
            traceback.print_exc()
            status = REFUSED + 1
        except BaseException:  # noqa: BLE001  the parent tells
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                log.flush()
                (said / "modules").write_text("\n".join(sorted(sys.modules)))
            os._exit(status)


class Cluster:
    """Nodes with their disks, and the bucket."""

    def __init__(self, seed: int) -> None:
        keep_descriptions()
        self.server = Server()
        os.environ.update(self.server.environment)
        self.client, self.proxy = self.server.client(), Proxied(self.server)
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.place = Path(tempfile.mkdtemp(prefix="megaresume-nodes-", dir=memory))
        self.random, self.seed, self.runs = random.Random(seed), seed, 0
        self.is_warm = False
        #: saves whose every weight was compared.
        self.opened: set[str] = set()
        self.counts: collections.Counter[str] = collections.Counter()
        self.new_run()

    def close(self) -> None:
        self.proxy.close()
        self.server.close()
        shutil.rmtree(self.place, ignore_errors=True)

    def new_run(self) -> None:
        """Empty disks, another URL."""
        self.runs += 1
        prefix = f"nodes-{self.seed}-{self.runs}"
        self.url, self.bucket = f"s3://runs/{prefix}", Bucket(self.client, prefix)
        self.root = self.place / prefix
        self.record = self.root / "record"
        self.record.mkdir(parents=True)
        self.disks = [self.root / f"disk_{number}" for number in range(3)]
        self.seen: dict[int, list[int]] = {}
        self.best = 0

    def start(
        self,
        ranks: int,
        steps: int,
        *,
        kill: tuple[int, int, float] | None = None,
        pause: float = 0.04,
        save_every: int = 2,
        position_every: int | None = None,
        die: int | None = None,
        fault: tuple[int, str, int] | None = None,
        stop: float | None = None,
        until: int | None = None,
    ) -> list[int]:
        """One start of the job; ``kill``: which rank, after how many saves, and seconds from there: then the launcher
        ends the others, too; ``fault``: to which rank, what, and at which of its requests (proxy.py); ``stop``: SIGTERM
        to all, after so many seconds; ``until``: kill all, once rank 0 has saved this step.

        Returns:
            the status of every rank; negative: the signal.
        """
        for path in self.record.glob("rank_*"):
            path.unlink()
        port, pids = free_port(), list[int]()
        for rank in range(ranks):
            if not (pid := os.fork()):
                if fault is not None and fault[0] == rank:
                    os.environ["AWS_ENDPOINT_URL"] = self.proxy.url
                work = (self.disks[rank], self.url, steps, self.record, pause, save_every, position_every, die)
                _life(rank, ranks, port, self.root, *work)
            pids.append(pid)
            if fault is not None and fault[0] == rank:
                self.proxy.plan(pid=pid, fault=fault[1], at=fault[2])
        statuses: dict[int, int] = {}
        doomed = pids if kill is None else [pids[kill[0]]]
        began, from_here = time.monotonic(), kill is not None and self.random.random() < 0.3
        others_later = self.random.choice((0.02, 0.5))
        deadline = began + (600.0 if kill is None or not from_here else kill[2])
        while len(statuses) < ranks:
            time.sleep(0.005)
            if not from_here and self._saves() >= (0 if kill is None else kill[1]):
                began, from_here = time.monotonic(), True
                deadline = deadline if kill is None else began + kill[2]
            if stop is not None and from_here and time.monotonic() > began + stop:
                for pid in set(pids) - set(statuses):
                    os.kill(pid, signal.SIGTERM)
                stop = None
            if until is not None and self._has_saved(until):
                deadline, doomed, until = 0.0, pids, None
            for pid in set(pids) - set(statuses):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
                    if statuses[pid] not in (0, STOPPED):
                        deadline, doomed = min(deadline, time.monotonic() + 3.0), pids
            if time.monotonic() > deadline:
                for pid in set(doomed) - set(statuses):
                    os.kill(pid, signal.SIGKILL)
                deadline, doomed = time.monotonic() + others_later, pids
        self._warm()
        return [statuses[pid] for pid in pids]

    def _has_saved(self, step: int) -> bool:
        path = self.record / "rank_0"
        return path.exists() and f'"saved": {step},' in path.read_text()

    def _saves(self) -> int:
        """How many this start has made; -1: training has not begun."""
        path = self.record / "rank_0"
        return path.read_text().count('"saved"') if path.exists() else -1

    def _warm(self) -> None:
        """Import what a node has imported, for the forks to come."""
        names = self.root / "modules"
        for name in names.read_text().splitlines() if names.exists() and not self.is_warm else ():
            if name not in sys.modules and not name.startswith("__"):
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
        if names.exists() and not self.is_warm:
            self.is_warm = True
            gc.collect()
            freeze()

    def judge(self) -> list[int]:
        """The steps that count in the bucket, the newest last; each of them is looked up, and once opened.

        Raises:
            Lost: one of them is not whole, or one that counted before does not, or an item was trained in another step.
        """
        heads = self.bucket.heads()
        saves = heads[-1]["saves"] if heads else []
        for saved in saves:
            self._open(saved["iteration"], saved["tag"], saved["save_id"])
        steps = sorted(saved["iteration"] for saved in saves)
        if steps and heads[-1]["latest"] not in {saved["tag"] for saved in saves}:
            raise Lost(f"latest names {heads[-1]['latest']}, which does not count")
        newest = max(steps, default=0)
        if newest < self.best:
            raise Lost(f"step {self.best} counted, and now {newest} is the newest")
        self.best = newest
        return steps

    def _open(self, step: int, tag: str, save: str) -> None:
        keys = self.bucket.keys()
        manifest = json.loads(self.bucket.get(f"megaresume/{save}/step_{step:07d}.manifest.json"))
        names = [path for path, *_ in manifest["files"]]
        if "part" in manifest or sorted(names) != sorted(
            key.removeprefix(f"{tag}/{save}/") for key in keys if key.startswith(f"{tag}/{save}/")
        ):
            raise Lost(f"{tag}: the manifest names {sorted(names)}, and other files are there")
        if any(keys[f"{tag}/{save}/{path}"] != size for path, size, _ in manifest["files"]):
            raise Lost(f"{tag}: a file has another size than the manifest says")
        if save in self.opened:
            return
        with tempfile.TemporaryDirectory(dir=self.place) as directory:
            for name in names:
                (Path(directory) / name).write_bytes(self.bucket.get(f"{tag}/{save}/{name}"))
            metadata = dcp.FileSystemReader(directory).read_metadata()
            state = {
                name: torch.full(entry.size, -1.0)
                for name, entry in metadata.state_dict_metadata.items()
                if hasattr(entry, "size") and name.endswith(("first", "second"))
            }
            if len(state) < 2:
                raise Lost(f"{tag}: no weights in it: {sorted(metadata.state_dict_metadata)}")
            dcp.load(state, checkpoint_id=directory, no_dist=True)
            self.opened.add(save)
            for name, tensor in state.items():
                if set(tensor.flatten().tolist()) != {float(step)}:
                    raise Lost(f"{tag}: {name} holds {sorted(set(tensor.flatten().tolist()))}")

    def judge_start(self, before: int, ranks: int) -> None:
        """Hold what the ranks have written down against what counted when they began.

        Raises:
            Lost: they began before it, or with other weights; or a step had other items than at another try.
        """
        items: dict[int, list[int]] = {}
        for rank in range(ranks):
            path = self.record / f"rank_{rank}"
            for line in path.read_text().splitlines() if path.exists() else ():
                told = json.loads(line)
                if "start" in told:
                    if told["start"] < before or told["weights"] != [float(told["start"])]:
                        raise Lost(f"step {before} counted, and rank {rank} began with {told}")
                elif "items" in told:
                    items.setdefault(told["step"], []).extend(told["items"])
        for step, some in items.items():
            if len(some) == BATCH and self.seen.setdefault(step, sorted(some)) != sorted(some):
                raise Lost(f"step {step} had the items {self.seen[step]}, and now {sorted(some)}")

    def said(self) -> str:
        logs = [path.read_text()[-3000:] for path in sorted(self.root.glob("rank_*.log"))]
        return "\n----\n".join(logs)

    def _lost_others(self, status: int, rank: int) -> bool:
        """Whether a rank that ended by an error missed another one, and had no other reason."""
        lines = (self.root / f"rank_{rank}.log").read_text().strip().splitlines()
        if status == REFUSED + 1:
            return any("a rank has ended while others waited for it" in line for line in lines[-8:])
        return status != 1 or any(
            word in lines[-1] for word in ("gloo", "torch.distributed.Dist", "Connection", "recv")
        )

    def lose_disks(self) -> str:
        """Machines are replaced, or change places."""
        what = self.random.choice(("none", "none", "first", "second", "all", "swapped"))
        gone = {"first": self.disks[:1], "second": self.disks[1:2], "all": self.disks}.get(what, [])
        for disk in gone:
            shutil.rmtree(disk, ignore_errors=True)
        if what == "swapped":
            self.disks[0], self.disks[1] = self.disks[1], self.disks[0]
        return what

    def life(self, starts: int) -> None:
        """A run that is started so many times and killed, and then comes to its end."""
        told: list[str] = []
        try:
            for _ in range(starts):
                ranks = self.random.choice((2, 2, 2, 3, 1))
                victim, saves = self.random.randrange(ranks), self.random.randrange(5)
                seconds = self.random.uniform(0.0, 1.0)
                fault = None
                if self.random.random() < 0.5:
                    fault = victim, self.random.choice(FAULTS), self.random.randint(1, 80)
                statuses = self.start(ranks, self.best + 100, kill=(victim, saves, seconds), fault=fault)
                told.append(
                    f"{ranks} nodes, node {victim} killed {seconds:.2f} s after {saves} saves, {fault}: {statuses}"
                )
                before = self.best
                self.judge()
                self.judge_start(before, ranks)
                if REFUSED in statuses and not self.best:
                    self.counts["nothing was ever copied, and a disk was lost"] += 1
                    return
                expected = {-signal.SIGKILL, 1, 0, REFUSED + 1}
                if fault is not None:  # a start that a store refuses ends with an error of ours
                    statuses = [0 if status == REFUSED + 1 else status for status in statuses]
                if not expected.issuperset(statuses) or not all(map(self._lost_others, statuses, range(ranks))):
                    raise Lost(f"it ended with {statuses}")
                what = self.lose_disks()
                told.append(f"disks lost: {what}")
                how = "killed" if fault is None else fault[1]
                self.counts[f"{ranks} nodes, node {min(victim, 1)}: {how}; disks lost: {what}"] += 1
            if not self.best and not all(disk.exists() for disk in self.disks):
                return  # as above
            before, ranks = self.best, self.random.choice((1, 2, 3))
            statuses = self.start(ranks, before + 1000, stop=self.random.uniform(0.1, 1.0))
            told.append(f"{ranks} nodes, asked to stop: {statuses}")
            lines = [json.loads(line) for line in (self.record / "rank_0").read_text().splitlines()]
            done = max((line["done"] for line in lines if "done" in line), default=before)
            newest = max(self.judge(), default=0)
            if set(statuses) != {STOPPED} or newest != done:
                raise Lost(f"they stopped after step {done}, and {newest} is the newest")
            self.judge_start(before, ranks)
            self.counts[f"{ranks} nodes, asked to stop"] += 1
            before, ranks = self.best, self.random.choice((1, 2, 3))
            end = before // 2 * 2 + 4
            statuses = self.start(ranks, end)
            told.append(f"{ranks} nodes to the end: {statuses}")
            steps = self.judge()
            self.judge_start(before, ranks)
            if any(statuses) or max(steps) < end:
                raise Lost(f"the last start came to {steps}")
        except Lost as error:
            raise Lost(f"seed {self.seed}, {self.url}: {'; '.join(told)}: {error}\n{self.said()}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=150, help="starts that are killed")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    cluster, began = Cluster(args.seed), time.monotonic()
    try:
        while cluster.counts.total() < args.count or not cluster.opened:  # a machine may save nothing in a few tries
            cluster.life(min(5, max(2, args.count - cluster.counts.total())))
            root = cluster.root
            cluster.new_run()
            shutil.rmtree(root, ignore_errors=True)
            print(f"{cluster.counts.total()} tries, {time.monotonic() - began:.0f} s", flush=True)
    finally:
        cluster.close()
    for name, count in sorted(cluster.counts.items()):
        print(f"{count:6} {name}")
    print(f"{len(cluster.opened)} checkpoints opened; {cluster.counts.total()} tries, 0 lost", flush=True)


if __name__ == "__main__":
    main()
