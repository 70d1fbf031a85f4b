"""A process that has imported torch and what else VeRL needs, and forks what would be started as `python SCRIPT ...`: a
job of ten processes in seconds instead of minutes.

    python warm.py SOCKET          the process that forks, in the environment that its scripts are imported in
    PYTHON SCRIPT ...              `interpreter` makes PYTHON, which Ray is told is its `sys.executable`: it hands
                                   arguments, environment and descriptors over, and waits for the end of what was forked

Ray starts its workers with setup_worker.py, which sets the environment and executes default_worker.py: a fork does the
same. Everything is killed as processes are; only imports are shared.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: what the processes of a job import, and does not import Ray, whose library reads its environment as it is loaded.
MODULES = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "accelerate",
    "aiohttp",
    "datasets",
    "einops",
    "fastapi",
    "hydra",
    "lark",
    "megatron.core.models.gpt",
    "msgspec",
    "networkx",
    "opentelemetry.sdk.metrics",
    "orjson",
    "pandas",
    "peft",
    "pydantic",
    "tensordict",
    "torchdata.stateful_dataloader",
    "uvicorn",
    "wandb",
    "zmq",
    "megaresume.hosts.prompts",
    "megaresume.runs.prompts",
)
#: what stands in for the interpreter. Light: it only sends.
_INTERPRETER = """#!{python} -SE
import array, json, os, socket, sys
words = sys.argv[1:]
script = next((k for k, word in enumerate(words) if word.endswith(".py")), None)
if script is None or any(word not in ("-u", "-S") for word in words[:script]):
    os.execv({python!r}, [{python!r}, *words])
there = socket.socket(socket.AF_UNIX)
there.connect({socket!r})
asked = json.dumps({{"argv": words[script:], "environ": dict(os.environ), "cwd": os.getcwd()}}).encode()
there.sendmsg([len(asked).to_bytes(8, "little")],
              [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
there.sendall(asked)
status = there.recv(8)
os._exit(int(status) if status else 1)
"""


@contextlib.contextmanager
def interpreter(python: str, directory: Path, environment: dict[str, str]) -> Iterator[tuple[str, int]]:
    """A stand-in for ``python``, and the process id of what forks for it, in this environment."""
    with tempfile.TemporaryDirectory(prefix="warm", dir="/tmp") as made:  # a path of a socket is short
        path, stand_in = Path(made, "socket"), Path(made, "python")
        stand_in.write_text(_INTERPRETER.format(python=python, socket=str(path)))
        stand_in.chmod(0o755)
        with (directory / "warm.log").open("w") as log:
            words = [python, __file__, str(path)]
            process = subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            while not path.exists():
                assert process.poll() is None, (directory / "warm.log").read_text()[-6000:]
                time.sleep(0.1)
            yield str(stand_in), process.pid
        finally:
            process.kill()
            process.wait()


def main(path: str) -> None:
    """Import, listen, fork."""
    import importlib

    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(name, error, flush=True)
    assert "ray" not in sys.modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    server = socket.socket(socket.AF_UNIX)
    server.bind(path + ".new")
    server.listen(100)
    os.rename(path + ".new", path)
    while True:
        there, _ = server.accept()
        if os.fork():
            there.close()
        else:
            server.close()
            # A parent that waits for it, as a caller would.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            asked, descriptors = _received(there)
            child = os.fork()
            if child:
                for one in descriptors:
                    os.close(one)
                _, status = os.waitpid(child, 0)
                with contextlib.suppress(OSError):
                    there.sendall(str(os.waitstatus_to_exitcode(status) & 255).encode())
                os._exit(0)
            there.close()
            _become(asked, descriptors)


def _received(there: socket.socket) -> tuple[Any, list[int]]:
    size, ancillary, _, _ = there.recvmsg(8, socket.CMSG_SPACE(3 * 4))
    descriptors = array.array("i", ancillary[0][2]).tolist()
    left, text = int.from_bytes(size, "little"), b""
    while len(text) < left:
        text += there.recv(left - len(text))
    return json.loads(text), descriptors


def _become(asked: Any, descriptors: list[int]) -> None:
    """The script, as its own process would run it."""
    import random

    import numpy as np
    import torch

    os.setsid()
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["environ"])
    for number, one in enumerate(descriptors):
        os.dup2(one, number)
        os.close(one)
    random.seed()
    np.random.seed()
    torch.seed()
    words = asked["argv"]
    if words[0].endswith("setup_worker.py"):
        from ray._private.runtime_env.context import RuntimeEnvContext
        from ray._private.utils import update_envs

        context = next(word for word in words if word.startswith("--serialized-runtime-env-context="))
        update_envs(RuntimeEnvContext.deserialize(context.partition("=")[2]).env_vars)
        at = next(k for k, word in enumerate(words) if word.endswith("default_worker.py"))
        words = [word for word in words[at:] if not word.startswith(("--serialized-runtime-env-context", "--language"))]
    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent)
    status = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001  as an interpreter does
        import traceback

        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1])
