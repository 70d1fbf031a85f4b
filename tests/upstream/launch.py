"""One training run of an unmodified upstream script: its command line, its processes, its log.

On a machine without CUDA ``cpu_shim.py`` stands before the worker; with CUDA it does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from megaresume.cluster.processes import free_port
from tests.upstream.trees import Tree, environment

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
GLOBAL_BATCH = 8
#: of a whole run, whatever its batch sizes are.
SAMPLES = 80
#: far more than a run needs on a machine that others use as well.
SECONDS = 1800

#: Tiny, and without anything that needs CUDA. Flags that both projects have.
_MODEL = """
    --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 2 --lr 1e-3 --attention-dropout 0 --hidden-dropout 0 --num-workers 0
    --log-interval 1 --eval-iters 1 --eval-interval 1000
"""
_TOKENIZER = "--tokenizer-type NullTokenizer --vocab-size 299"
_CPU = """
    --distributed-backend gloo --use-cpu-initialization --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-dropout-fusion
"""
#: bigscience has no such flag.
_CPU_BUT_BIGSCIENCE = "--no-gradient-accumulation-fusion"
_CPU_LM = "--no-rope-fusion --no-persist-layer-norm --no-check-for-nan-in-loss-and-grad"
#: Transformer Engine is not wanted on a GPU either.
_LM = "--transformer-impl local"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Numbers of ranks: data, tensor, pipeline, virtual pipeline (stages of a rank), context."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1

    @property
    def size(self) -> int:
        """Processes."""
        return self.dp * self.tp * self.pp * self.cp

    def __str__(self) -> str:
        sizes = {"DP": self.dp, "TP": self.tp, "PP": self.pp, "VPP": self.vpp, "CP": self.cp}
        return " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "DP 1"

    def flags(self) -> list[str]:
        """As Megatron-LM takes them."""
        sizes = {"tensor-model": self.tp, "pipeline-model": self.pp, "context": self.cp}
        flags = [word for name, n in sizes.items() if n > 1 for word in (f"--{name}-parallel-size", str(n))]
        return flags + (["--num-layers-per-virtual-pipeline-stage", "1"] if self.vpp > 1 else [])


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What a series of runs has in common."""

    tree: Tree
    python: Path
    cuda: bool
    #: prefixes of .bin/.idx, by name, with their weights.
    corpora: dict[str, tuple[Path, str]]
    folder: Path
    #: stream, guard; stock: without megaresume at all.
    mode: str
    #: flags of this series, for example the checkpoint format.
    flags: tuple[str, ...] = ()
    #: a data path for each of train, valid and test, in the place of one and a split.
    is_split: bool = False
    #: --train-samples in the place of --train-iters.
    counts_samples: bool = False
    #: ZeRO stage, for Megatron-DeepSpeed.
    zero: int = 0
    #: the script, if it is not the tree's own: a patched copy, which needs no launcher.
    script: Path | None = None
    save_interval: int = 5

    def but(self, **changes: object) -> Setup:
        """The same with changes."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of one run."""

    status: int
    seconds: float
    log: Path
    batches: Path
    command: list[str] = field(repr=False)

    @property
    def text(self) -> str:
        """All that it printed."""
        return self.log.read_text(errors="replace")

    def last_error(self) -> str:
        """The line of its log that says most about why it failed."""
        lines = [line.strip() for line in self.text.splitlines()]
        ours = [i for i, line in enumerate(lines) if line.startswith(("megaresume: error", "error:"))]
        if ours:
            return " ".join(lines[ours[-1] : ours[-1] + 3])[:300]
        other = ("ChildFailed", "error_file", "raise ")
        errors = [line for line in lines if "Error" in line and not any(word in line for word in other)]
        return (errors[0] if errors else f"exit status {self.status}")[:300]


def train(setup: Setup, name: str, *, layout: Layout, save: Path, kill: str | None = None) -> Outcome:
    """Run it from what ``save`` holds, into ``save``, until it ends.

    Args:
        setup: the series.
        name: of this run, for its log.
        layout: of its processes.
        save: checkpoint root.
        kill: RANK:SAMPLES:MICRO; see `worker`.
    """
    folder = setup.folder / name
    batches = folder / "batches"
    batches.mkdir(parents=True)
    env = environment(setup.python) | {
        "PYTHONPATH": os.pathsep.join([*setup.tree.path, str(REPOSITORY)]),
        "UPSTREAM_LOG": str(batches),
        "LOCAL_SIZE": str(layout.size),
        **dict(setup.tree.upstream.variables),
    }
    if kill is not None:
        env["UPSTREAM_KILL"] = kill
    if not setup.cuda:
        env["DS_ACCELERATOR"] = "cpu"
    script = setup.script or setup.tree.script
    launcher = [] if setup.script is not None or setup.mode == "stock" else ["-m", "megaresume.run"]
    command = [
        *(str(setup.python), "-m", "torch.distributed.run", "--nproc-per-node", str(layout.size)),
        *("--master-port", str(free_port())),
        *_shims(setup),
        *(str(HERE / "worker.py"), *launcher, str(script)),
        *_flags(setup, folder, save),
        *layout.flags(),
        *(word.format(folder=folder) for word in setup.tree.upstream.flags),
    ]
    log = folder / "log.txt"
    began = time.monotonic()
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait() or -1
        finally:
            _kill_left_behind(batches)
    return Outcome(status=status, seconds=time.monotonic() - began, log=log, batches=batches, command=command)


def _kill_left_behind(batches: Path) -> None:
    """What a killed rank leaves: megatron-core's persistent checkpoint writer, of a session of its own."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            if process.environ().get("UPSTREAM_LOG") == str(batches):
                process.kill()


def _shims(setup: Setup) -> list[str]:
    own = {"megatron-deepspeed": ["deepspeedai_shim.py"], "bigscience": ["bigscience_shim.py"]}
    # DeepSpeed has a CPU of its own, which deepspeedai's scripts ask for.
    cpu = [] if setup.cuda or setup.tree.kind == "megatron-deepspeed" else ["cpu_shim.py"]
    return [str(HERE / name) for name in [*cpu, *own.get(setup.tree.kind, [])]]


def _byte_tokenizer(folder: Path) -> list[str]:
    """bigscience has no NullTokenizer: a vocabulary of 256 bytes and the end of a document."""
    names = {chr(33 + byte) if byte < 94 else f"byte{byte}": byte for byte in range(256)} | {"<|endoftext|>": 256}
    (folder / "vocab.json").write_text(json.dumps(names))
    (folder / "merges.txt").write_text("#version\n")
    files = ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]
    return ["--tokenizer-type", "GPT2BPETokenizer", *files, "--make-vocab-size-divisible-by", "384"]


def _data(setup: Setup) -> list[str]:
    blend = [word for path, weight in setup.corpora.values() for word in (weight, str(path))]
    if not setup.is_split:
        return ["--data-path", *blend, "--split", "90,5,5"]
    *train, (valid, _) = setup.corpora.values()
    words = [word for path, weight in train for word in (weight, str(path))]
    return ["--train-data-path", *words, "--valid-data-path", str(valid), "--test-data-path", str(valid)]


def _flags(setup: Setup, folder: Path, save: Path) -> list[str]:
    is_lm = setup.tree.kind == "megatron-lm"
    length = ["--train-samples", str(SAMPLES)]
    if not setup.counts_samples:
        length = ["--train-iters", str(SAMPLES // GLOBAL_BATCH)]
    flags = [
        *_MODEL.split(),
        *length,
        *_data(setup),
        *("--save", str(save), "--load", str(save), "--save-interval", str(setup.save_interval)),
    ]
    if "--step-batch-size-schedule" not in setup.flags:
        flags += ["--global-batch-size", str(GLOBAL_BATCH)]
    if not setup.cuda:
        flags += _CPU.split()
    if setup.tree.kind == "bigscience":
        flags += _byte_tokenizer(folder)
    else:
        flags += [*_TOKENIZER.split(), "--data-cache-path", str(setup.folder / "cache")]
        flags += [] if setup.cuda else _CPU_BUT_BIGSCIENCE.split()
    if is_lm:
        flags += _LM.split() + ([] if setup.cuda else _CPU_LM.split())
    else:
        config = folder / "ds.json"
        zero = {"stage": setup.zero}
        sizes = {"train_batch_size": GLOBAL_BATCH, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 100}
        config.write_text(json.dumps(sizes | {"zero_optimization": zero}))
        flags += ["--deepspeed", "--deepspeed_config", str(config), "--zero-stage", str(setup.zero)]
    if setup.mode != "stock":
        flags += ["--megaresume-mode", setup.mode]
    return [*flags, *setup.flags]
