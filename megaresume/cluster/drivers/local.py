"""The driver of ``launch/torchrun.sh`` and ``launch/deepspeed.sh``: one node of a training, without a scheduler.

the launcher is started so that signals to this script do not reach it
TERM, USR1, INT, HUP   -> the stop file, and USR1 for all ranks here: they save at the end of their step
when it ends           -> the ledger tells whether the run is finished, not the exit status
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from megaresume.checkpoint.records.ledger import ATTEMPT
from megaresume.cluster.drivers.attempts import Ledgers, checkpoint_roots, without_pins
from megaresume.cluster.drivers.decide import AttemptProgress
from megaresume.cluster.drivers.driver import LaunchDriver, LaunchSettings, count_gpus
from megaresume.runs.logs import shell_status
from megaresume.stream.errors import MegaresumeError, UsageError

_POLL = 0.1
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSettings(LaunchSettings):
    """The settings of the scripts that need no scheduler; "" for settings that a script does not have."""

    nnodes: str
    node_rank: str
    master_addr: str
    master_port: str
    stop_status: str
    rendezvous: str = ""
    hostfile: str = ""


def run(launcher: str, settings: LocalSettings) -> int:
    """Train on this node under ``torchrun`` or ``deepspeed``; returns the exit status of the script."""
    driver = LocalDriver(launcher, settings)
    try:
        return driver.run()
    except MegaresumeError as error:
        driver.say_refused("refused", error)
        return 2


class LocalDriver(LaunchDriver):
    """One call of a launch script, on this machine."""

    def __init__(self, launcher: str, settings: LocalSettings) -> None:
        super().__init__(settings, Path(settings.run_dir))
        self.launcher, self.settings = launcher, settings
        self._heard: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    def say(self, words: str) -> None:
        """Write a line to the log."""
        name = os.path.basename(self.settings.script)
        print(f"{time.strftime('%FT%T')} [{name}, node {self.settings.node_rank or 0}] {words}", flush=True)

    def run(self) -> int:
        """See `run`. Raises UsageError."""
        settings = self.settings
        ranks = self._check()
        if self.launcher == "torchrun" and settings.hostfile and not settings.node_rank:
            return self._over_ssh()
        os.environ["PATH"] = f"{Path(shutil.which(settings.python) or '').parent}:{os.environ['PATH']}"
        attempt = None  # for nodes other than rank 0's
        os.environ["PYTHONUNBUFFERED"] = "1"
        if (settings.node_rank or "0") == "0":
            # A stop file that came too late for the last attempt would stop this one.
            self.stop_file.unlink(missing_ok=True)
            attempt = os.environ[ATTEMPT] = f"{os.uname().nodename}.{os.getpid()}.{time.time_ns()}"
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)  # left by a job around this one
        training = self.training
        ledgers = Ledgers(checkpoint_roots(training, Path.cwd()), attempt)
        for number in _SIGNALS:
            signal.signal(number, lambda number, frame: self._heard.append(number))
        with tempfile.TemporaryDirectory() as scratch:
            command = self._torchrun(ranks) if self.launcher == "torchrun" else self._deepspeed(ranks, Path(scratch))
            if self.launcher == "deepspeed" and training[0] == "-m":
                training = ("--module", *training[1:])  # for Python, the word after -m is a module
            nodes = settings.hostfile or f"{settings.nnodes} node(s)"
            self.say(
                f"start: {nodes}, {ranks} rank(s) on each, MAX_RESTARTS={settings.max_restarts}, "
                f"RUN_DIR={settings.run_dir}"
            )
            restarts = 0
            while True:
                if restarts and ledgers.progress().saved is not None:
                    training, pins = without_pins(training)
                    if pins:
                        self.say(f"{' '.join(pins)} is left out: it has saved since, and resumes from there")
                status = self._train([*command, *training])
                # torchrun restarts its ranks itself.
                if not status or self.signal or self.launcher == "torchrun" or restarts >= int(settings.max_restarts):
                    break
                restarts += 1
                self.say(
                    f"failed: status {status}; restart {restarts} of {settings.max_restarts} from the last checkpoint"
                )
        return self._end(status, ledgers.progress(status=status))

    def _over_ssh(self) -> int:
        """Start this script on every node of HOSTFILE; a signal reaches them through the stop file."""
        settings = self.settings
        lines = [line.split() for line in Path(settings.hostfile).read_text().splitlines()]
        hosts = [(words[0], dict(word.partition("=")[::2] for word in words[1:])) for words in lines if words]
        if not hosts:
            raise UsageError(f"HOSTFILE={settings.hostfile} names no node", action="lines such as: node1 slots=8")
        own = {field.name.upper(): getattr(settings, field.name) for field in fields(settings) if field.type == "str"}
        own |= {"HOSTFILE": "", "NNODES": settings.nnodes if ":" in settings.nnodes else str(len(hosts))}
        own |= {"MASTER_ADDR": settings.master_addr or hosts[0][0]}
        script = shlex.join([os.path.abspath(own.pop("SCRIPT")), *settings.flags])
        for number in _SIGNALS:
            signal.signal(number, lambda number, frame: self._heard.append(number))
        nodes = []
        for rank, (host, words) in enumerate(hosts):
            slots = words.get("slots") if settings.procs_per_node == "auto" else None
            variables = own | {"NODE_RANK": str(rank), "PROCS_PER_NODE": slots or settings.procs_per_node}
            there = shlex.join(["env", *(f"{name}={value}" for name, value in variables.items())])
            command = ["ssh", "-o", "BatchMode=yes", host, f"cd {shlex.quote(os.getcwd())} && exec {there} {script}"]
            nodes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True))
        while any([node.poll() is None for node in nodes]):  # noqa: C419  all of them are to be reaped
            self._hear()
            time.sleep(_POLL)
        statuses = [shell_status(node.returncode) for node in nodes]
        self.say(f"the nodes ended with status {', '.join(map(str, statuses))}")
        failed = [status for status in statuses if status not in (0, int(settings.stop_status))]
        return failed[0] if failed else max(statuses)

    def _check(self) -> int:
        settings = self.settings
        settings.check_python()
        settings.check_data(f" (in {Path.cwd()})")
        settings.check_script(f" (in {Path.cwd()})")
        least, colon, most = settings.nnodes.partition(":")
        is_range = self.launcher == "torchrun" and colon and most.isdecimal()
        if not least.isdecimal() or (colon and not is_range):
            raise UsageError(f"NNODES={settings.nnodes} is neither a number nor MIN:MAX")
        settings.check_numbers((*(["NODE_RANK"] if settings.node_rank else []), "MAX_RESTARTS", "STOP_STATUS"))
        if settings.hostfile and not Path(settings.hostfile).is_file():
            raise UsageError(f"there is no HOSTFILE={settings.hostfile}", action="lines such as: node1 slots=8")
        if self.launcher == "deepspeed":
            several = settings.hostfile or settings.nnodes != "1"
            if settings.nnodes != "1" and not settings.hostfile and not settings.node_rank:
                raise UsageError(
                    f"NNODES={settings.nnodes}, and neither HOSTFILE nor NODE_RANK",
                    action="one of the two: with ssh, or on every node without",
                )
            if settings.node_rank and several and not settings.master_addr:
                action = "MASTER_ADDR=address-of-node-0, the same on all nodes"
                raise UsageError("NODE_RANK without MASTER_ADDR", action=action)
        restarts_in_place = self.launcher == "torchrun" and (int(settings.max_restarts) or colon)
        if restarts_in_place and (pins := without_pins(self.training)[1]):
            raise UsageError(
                f"each restart in place would begin at {' '.join(pins)} again, whatever was saved since",
                action="MAX_RESTARTS=0 and a fixed NNODES for this start; once it has saved, without the flag",
            )
        ranks = settings.ranks_per_node(lambda: str(count_gpus() or 1))
        self.make_run_dir(self.run_dir)
        return ranks

    # ---- the launchers

    def _torchrun(self, ranks: int) -> list[str]:
        settings = self.settings
        nodes, rank, port = settings.nnodes, settings.node_rank or "0", settings.master_port
        address = settings.master_addr or "127.0.0.1"
        restarts = int(settings.max_restarts)
        if nodes == "1":
            rendezvous = ["--standalone", "--local-addr", "127.0.0.1"]
        elif ":" not in nodes and not restarts:
            # Every node knows its number, so nothing is negotiated, and the ranks' port is known.
            rendezvous = ["--nnodes", nodes, "--node-rank", rank, "--master-addr", address, "--master-port", port]
        else:
            # Any node may become the first: the others need its address, as they may not know its name. As long as node
            # 0 hosts the rendezvous, every departure and arrival is noticed, and all ranks restart.
            own = address if rank == "0" else _own_address(address)
            rendezvous = ["--nnodes", nodes, "--local-addr", own, "--rdzv-backend", "c10d", "--rdzv-id", "megaresume"]
            rendezvous += ["--rdzv-endpoint", f"{address}:{port}"]
            rendezvous += ["--rdzv-conf", f"is_host={int(rank == '0')},{settings.rendezvous}"]
        if ":" in nodes or restarts:
            # Otherwise, restarted ranks would find their predecessors' addresses in the agents' store, or look for it
            # on a first node that is gone. If no ranks are restarted, the agents' store is better: it has a port
            # already, whereas another process may take the one that torchrun finds for the ranks before they bind it.
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        words = [settings.python, "-m", "torch.distributed.run", *rendezvous]
        return [*words, "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]

    def _deepspeed(self, ranks: int, scratch: Path) -> list[str]:
        settings = self.settings
        place: list[str]
        if settings.hostfile and not settings.node_rank:
            place = ["--hostfile", settings.hostfile, "--master_port", settings.master_port or "29500"]
            place += ["--master_addr", settings.master_addr] if settings.master_addr else []
        elif settings.hostfile or settings.nnodes != "1":
            hosts = settings.hostfile
            if not hosts:
                # Without ssh the names do not matter, only the number of lines and the ranks of each.
                hosts = str(scratch / "hosts")
                lines = [f"node{node} slots={ranks}\n" for node in range(int(settings.nnodes))]
                Path(hosts).write_text("".join(lines))
            place = ["--hostfile", hosts, "--no_ssh", "--node_rank", settings.node_rank]
            place += ["--master_addr", settings.master_addr, "--master_port", settings.master_port or "29500"]
        else:
            # A port derived from this process: two runs on one machine must not meet.
            port = settings.master_port or str(10000 + os.getpid() % 20000)
            place = ["--hostfile", "/dev/null", "--master_port", port]
            # DeepSpeed only uses the GPUs in CUDA_VISIBLE_DEVICES if no number is given.
            if not os.environ.get("CUDA_VISIBLE_DEVICES"):
                place += ["--num_gpus", str(ranks)]
        return [settings.python, "-m", "deepspeed.launcher.runner", *place]

    # ---- the training

    def _train(self, command: Sequence[str]) -> int:
        """Run it, out of reach of a terminal's Ctrl-C and signals to the process group; returns its exit status."""

        def ignore() -> None:  # the launcher would die of the signals that its ranks handle
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

        with subprocess.Popen(command, start_new_session=True, preexec_fn=ignore) as process:
            self._process = process
            while process.poll() is None:
                self._hear()
                time.sleep(_POLL)
            self._hear()
            self._process = None
        return shell_status(process.returncode)

    def _hear(self) -> None:
        while self._heard:
            name = signal.Signals(self._heard.pop(0)).name.removeprefix("SIG")
            if self.signal is not None:
                self.say(f"{name} came: changes nothing, the ranks have been told")
                continue
            self.signal = name
            self.say(f"{name} came: all ranks save at the end of their step, then this script ends")
            self.touch_stop_file()
            if self._process is not None:
                # The launcher ignores the signal, which would kill it and its ranks.
                for process in _below(self._process.pid):
                    with suppress(OSError):
                        os.kill(process, signal.SIGUSR1)

    def _end(self, status: int, progress: AttemptProgress) -> int:
        pins = without_pins(self.training)[1] if progress.saved is not None else []
        again = f"the same command{' without ' if pins else ''}{' '.join(pins)} resumes"
        if progress.finished is not None:
            self.say(f"the run is over: it has said so after step {progress.finished}")
            return 0
        if status:
            after = f", after {self.signal}" if self.signal else ""
            self.say(f"failed: status {status}{after}; {again} from the last checkpoint")
            return status
        if self.signal:
            self.say(f"stopped by {self.signal}: the ranks have saved and ended; {again} from there")
        else:
            self.say(f"ended with status 0, and the run has not said that it is over: {again}")
        return int(self.settings.stop_status)


def _own_address(other: str) -> str:
    """The address at which another machine reaches this one. Raises UsageError."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((other, 9))  # sends nothing
            return str(way.getsockname()[0])
    except OSError as error:
        raise UsageError(f"MASTER_ADDR={other} is not known here: {error}") from error


def _below(pid: int) -> Iterator[int]:
    """All descendants of a process."""
    done = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True)
    children: dict[int, list[int]] = {}
    for line in done.stdout.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    waiting = [*children.get(pid, [])]
    while waiting:
        waiting += children.get(waiting[0], [])
        yield waiting.pop(0)
