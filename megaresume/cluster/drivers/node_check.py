"""A node's check of itself before a training; the driver starts it on every node.

python -m megaresume.cluster.drivers.node_check RUN_DIR DATA GPUS ADDRESS PORT NODES LAUNCHER TRAIN ...
    ->  one line: megaresume-node {"name": "n2", ...}

    disks    RUN_DIR, the directory for temporary files and /dev/shm are writable and not full
    data     the data config exists, as do the corpora, indexes and tokenizers in it            } compared
    program  the script of TRAIN exists, or its module, and tokenizers in its flags             } between
    imports  the launcher's imports work                                                        } the nodes
    GPUs     respond, and are as many as the ranks
    network  all nodes connect to the first one, at the ranks' address and port, and learn who is there
    clock    the time of day, compared by the driver

A node cannot tell whether something is missing only *here* or everywhere, so `judge` compares all answers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaresume.cluster.drivers.decide import BadNode
from megaresume.cluster.drivers.driver import gpus_listed, modules_of, script_of

#: the prefix of the line with an answer.
MARK = "megaresume-node "
#: bytes that must be free on a disk, enough for log lines and sockets.
_FREE = 64 << 20
#: seconds: most a clock may be off; until GPUs count as not responding; for imports from a slow file system.
CLOCK_TOLERANCE, _GPU_PATIENCE, _IMPORT_PATIENCE = 30.0, 60.0, 120.0
#: seconds for all nodes to answer.
_PATIENCE = 180.0
#: seconds that the first node waits for the others; and additional seconds that they wait for it.
_MEETING, _LATE = 60.0, 30.0
#: keys of data.yaml whose values are files read on every node.
_READ = re.compile("path|index|encoder|inputs|image_folder|lengths|.*(?:vocab|tokenizer|merge).*")
#: flags of training programs for files read on every node.
_READ_FLAGS = ("--tokenizer-model", "--vocab-file", "--merge-file", "--data-args-path")
#: launcher -> what it imports on every node.
_IMPORTS = {"torchrun": "torch.distributed.run", "srun": "torch", "deepspeed": "deepspeed.launcher.runner"}


def look(
    run_dir: Path, data: str, gpus: int, training: Sequence[str] = (), *, temporary: Sequence[str] | None = None
) -> dict[str, Any]:
    """Check this node.

    Args:
        run_dir: of the run.
        data: the data config; "": none.
        gpus: the number it should have; 0: none.
        training: the words after ``python``: a script or ``-m`` and a module, and flags.
        temporary: directories for temporary files; None: the system's.

    Returns:
        its name, ``problems`` in words, and ``missing`` paths and modules.
    """
    places = [str(run_dir), *(temporary or [tempfile.gettempdir(), "/dev/shm"])]
    problems = [problem for place in places if os.path.isdir(place) for problem in _disk(Path(place))]
    if not run_dir.is_dir():
        problems.append(f"does not see RUN_DIR={run_dir}")
    problems += _gpus(gpus) if gpus else []
    name = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    return {"name": name, "problems": problems, "missing": [*_missing(data), *_missing_of(training)]}


def _disk(place: Path) -> Iterator[str]:
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".megaresume-") as file:
            file.write(b"0" * 4096)
            file.flush()
            os.fsync(file.fileno())
        free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    except OSError as error:
        yield f"{place} cannot be written: {error.strerror or error}"
        return
    if free < _FREE:
        yield f"{place} is full: {free >> 20} MiB left"


def _gpus(expected: int) -> list[str]:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_GPU_PATIENCE)
    except FileNotFoundError:
        return []  # of another vendor, or not visible in this container: the training will show
    except subprocess.TimeoutExpired:
        return [f"its GPUs did not answer within {_GPU_PATIENCE:.0f} s (nvidia-smi -L)"]
    count = gpus_listed(done.stdout)
    if done.returncode == 0 and count >= expected:
        return []
    words = (done.stderr or done.stdout).strip().splitlines()[-1:]
    return [f"{count} of {expected} GPUs answer" + (f": {words[0]}" if words and done.returncode else "")]


def _missing(data: str) -> list[str]:
    path = Path(data)
    if not data or not path.is_file():
        return [data] if data else []
    import yaml  # deferred: a node without it still answers

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return []  # the training reports what is wrong with it
    return sorted(name for name in set(_paths(config)) if not _is_there(path.parent / _expanded(name)))


def _paths(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, str) and _READ.fullmatch(str(key)):
                if not any(sign in inner for sign in ("://", "{", "*")):
                    yield inner
            else:
                yield from _paths(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _paths(inner)


def _expanded(path: str) -> str:
    return os.path.expanduser(os.path.expandvars(path))


def _missing_of(training: Sequence[str]) -> list[str]:
    """The missing parts of a training command: its script or module, and files in its flags."""
    script = script_of(training)
    missing = [script] if script and not os.path.isfile(script) else []
    missing += [f"module {name}" for name in modules_of(training) if not _has_module(name)]
    for word, following in zip(training, [*training, ""][1:], strict=False):
        flag, equals, value = word.partition("=")
        value = value if equals else following
        if flag.replace("_", "-") in _READ_FLAGS and value and not os.path.exists(value):
            missing.append(value)
    return missing


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, AttributeError, ValueError):  # from a package around it
        return False


def start_import(module: str) -> subprocess.Popen[str]:
    """Import a module in a new process, as the training will; with many nodes, the first one may take long."""
    words = [sys.executable, "-c", f"import {module}"]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")


def why_not_imported(process: subprocess.Popen[str], patience: float = _IMPORT_PATIENCE) -> str:
    """Why an import failed, in one line; "" if it worked, or took too long, in which case the training will show it.

    Args:
        process: from `start_import`.
        patience: seconds.
    """
    try:
        said = process.communicate(timeout=patience)[1].strip().splitlines()
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return ""
    if process.returncode < 0:
        return f"ended by signal {-process.returncode}"
    return (said or [f"exit status {process.returncode}"])[-1] if process.returncode else ""


def _is_there(path: Path) -> bool:
    return path.exists() or Path(f"{path}.idx").exists()


def meet(name: str, *, is_first: bool, address: str, port: int, count: int, patience: float = _MEETING) -> list[str]:
    """Exchange one number among all nodes: who reached the first one.

    Args:
        name: of this node.
        is_first: whether this is the first node.
        address, port: of the first node.
        count: number of nodes, including this one.
        patience: seconds.

    Returns:
        names, in their order; []: this node could not reach the first one, or cannot be reached at the port.
    """
    if count == 1:
        return [name]
    with suppress(OSError, ValueError):
        return _await(name, port, count, patience) if is_first else _come(name, address, port, patience + _LATE)
    return []


def _await(name: str, port: int, count: int, patience: float) -> list[str]:
    deadline, names = time.monotonic() + patience, [name]
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("", port)))
        guests = []
        while len(names) < count and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            with suppress(OSError):
                guest = stack.enter_context(server.accept()[0])
                guest.settimeout(max(0.1, deadline - time.monotonic()))
                names.append(guest.makefile().readline().strip())
                guests.append(guest)
        for guest in guests:
            with suppress(OSError):
                guest.sendall(json.dumps(sorted(names)).encode() + b"\n")
    return sorted(names)


def _come(name: str, address: str, port: int, patience: float) -> list[str]:
    deadline = time.monotonic() + patience
    while True:
        try:
            host = socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic()))
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)  # the first node may start later
    with host:
        host.sendall(f"{name}\n".encode())
        return list(json.loads(host.makefile().readline()))


def answer_of(line: str) -> dict[str, Any] | None:
    """The answer in a line of output; None if it has none."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    try:
        answer = json.loads(text)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def ask_nodes(
    command: Sequence[str], env: Mapping[str, str]
) -> tuple[dict[str, dict[str, Any]], dict[str, float], list[str]]:
    """Run the check on every node.

    Args:
        command: starts this program on every node.
        env: environment of the command.

    Returns:
        the answers by node; when each came, seconds of `time.time`; and all other lines.
    """
    answers: dict[str, dict[str, Any]] = {}
    received: dict[str, float] = {}
    said: list[str] = []
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as asking:

        def listen() -> None:
            assert asking.stdout is not None
            for line in asking.stdout:
                if (answer := answer_of(line)) is None:
                    said.append(line.rstrip())
                else:
                    received[answer["name"]], answers[answer["name"]] = time.time(), answer

        reader = threading.Thread(target=listen, daemon=True)
        reader.start()
        reader.join(_PATIENCE)
        if asking.poll() is None and reader.is_alive():
            asking.kill()
    return answers, received, said


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of the checks of all nodes."""

    #: nodes that must not train.
    bad: tuple[BadNode, ...]
    #: paths, and ``module NAME``, that *every* node lacks, so that the settings are wrong.
    missing: tuple[str, ...] = ()
    #: in the same way, modules that no node can import, and the error.
    broken: tuple[tuple[str, str], ...] = ()


def judge(nodes: Sequence[str], answers: Mapping[str, Mapping[str, Any]], received: Mapping[str, float]) -> Verdict:
    """Find the nodes that must not train.

    Args:
        nodes: all nodes that were asked; the ranks meet on the first.
        answers: by node.
        received: when each came, seconds of `time.time`.
    """
    have_all = bool(answers) and len(answers) == len(nodes)
    missing = set.intersection(*(set(answer["missing"]) for answer in answers.values())) if have_all else set()
    broken = set.intersection(*(set(answer["broken"]) for answer in answers.values())) if have_all else set()
    apart, bad = _apart(nodes, answers), []
    for node in nodes:
        answer = answers.get(node)
        if answer is None:
            bad.append(BadNode(name=node, why="did not answer"))
            continue
        problems = list(answer["problems"])
        problems += [f"has no {path}, which other nodes have" for path in sorted({*answer["missing"]} - missing)]
        here = sorted({*answer["broken"]} - broken)
        problems += [f"cannot import {name}, as other nodes can: {answer['broken'][name]}" for name in here]
        problems += [apart[node]] if node in apart else []
        late = received[node] - answer["time"]
        if abs(late) > CLOCK_TOLERANCE:
            problems.append(f"its clock is {abs(late):.0f} s {'slow' if late > 0 else 'fast'}")
        if problems:
            bad.append(BadNode(name=node, why=", ".join(problems)))
    errors = next(iter(answers.values()))["broken"] if broken else {}
    return Verdict(
        bad=tuple(bad), missing=tuple(sorted(missing)), broken=tuple((name, errors[name]) for name in sorted(broken))
    )


def _apart(nodes: Sequence[str], answers: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Nodes that answered but did not meet, with the reason."""
    first, others = nodes[0], [node for node in nodes[1:] if node in answers]
    if first not in answers:
        return {}
    absent = [node for node in others if node not in answers[first]["met"]]
    reasons = dict.fromkeys(absent, f"does not reach {first}, where the ranks meet")
    if absent != others or not others:
        return reasons
    # Between two nodes, either may be at fault.
    return {first: "no other node reaches it at the port of the ranks"} | (reasons if len(others) == 1 else {})


def main(run_dir: str, data: str, gpus: str, address: str, port: str, count: str, launcher: str, *train: str) -> None:
    """Check, meet, and print the answer; the imports run meanwhile."""
    module = _IMPORTS[launcher]
    importing = start_import(module)
    said = look(Path(run_dir), data, int(gpus), train)
    is_first = os.environ.get("SLURM_NODEID", "0") == "0"
    said["met"] = meet(said["name"], is_first=is_first, address=address, port=int(port), count=int(count))
    error = why_not_imported(importing)
    said["broken"] = {module: error} if error else {}
    said["time"] = time.time()
    print(MARK + json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
