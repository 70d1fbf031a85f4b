"""A small corpus, and runs of the reference program: real processes, real checkpoints, real kills."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megaresume.cluster.processes import Launcher, LocalJob
from megaresume.cluster.records import RunRecords, read_records
from tests.corpora import progressions

VOCAB = 256
MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 256 --lr 1e-3 --split 9,1,0"


def write_corpus(prefix: Path, *, documents: int, seed: int, mean: int = 60) -> None:
    """Documents of ``mean`` tokens."""
    progressions(prefix, documents, seed, lengths=(3, 2 * mean), strides=(1, 7), vocabulary=VOCAB)


@pytest.fixture(scope="session")
def data_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two corpora, packed into sequences of 64 tokens."""
    directory = tmp_path_factory.mktemp("corpora")
    write_corpus(directory / "web", documents=400, seed=1)
    write_corpus(directory / "code", documents=200, seed=2)
    path = directory / "data.yaml"
    path.write_text(
        "seed: 1234\nseq_length: 64\npacking: {mode: best_fit, open_bins: 8}\n"
        "sources:\n  web: {path: web, weight: 0.7}\n  code: {path: code, weight: 0.3}\n"
    )
    return path


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One gloo process as megatron-core wants it."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megaresume.cluster.training.launch import seed_everything

    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    seed_everything(1, torch.device("cpu"))
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@dataclass
class Ended:
    """A run that ended, or was killed."""

    #: exit status; None: killed.
    status: int | None
    #: what this launch printed.
    text: str
    #: of the run, over all of its launches so far.
    log: Path

    @property
    def records(self) -> RunRecords:
        assert self.log.exists(), f"status {self.status}, and no step:\n{self.text[-4000:]}"
        return read_records(self.log)

    @property
    def resumed(self) -> str:
        """The resume line."""
        return next((line for line in self.text.splitlines() if line.startswith("megaresume: resumed")), "")


class Runs:
    """Launches of the program. The runs of one name share a log and an output file."""

    def __init__(self, directory: Path, data_yaml: Path) -> None:
        self.directory, self.data_yaml = directory, data_yaml
        self._numbers = itertools.count()

    def __call__(
        self,
        name: str,
        flags: str = "",
        *,
        num_processes: int = 2,
        launcher: Launcher = "env",
        kill_after: int | None = None,
        during: Callable[[LocalJob], None] | None = None,
        data: str | None = None,
    ) -> Ended:
        """Run to the end, or SIGKILL everything as soon as the log has the step ``kill_after``."""
        log = self.directory / f"{name}.jsonl"
        arguments = [*MODEL.split(), *flags.format(dir=self.directory).split(), "--megaresume-log-samples", str(log)]
        if kill_after is not None:
            arguments += ["--megaresume-min-step-seconds", "0.3"]  # the kill comes before the next save
        arguments += (data or f"--megaresume-data {self.data_yaml}").split()
        env = {"DS_ACCELERATOR": "cpu", "MEGARESUME_CACHE": str(self.directory / "cache")}
        before = log.stat().st_size if log.exists() else 0

        def reached() -> bool:
            new = log.read_bytes()[before:] if log.exists() else b""
            return f'"event": "step", "step": {kill_after},'.encode() in new

        output = self.directory / f"{name}.txt"
        with LocalJob(
            "megaresume.cluster.training",
            arguments,
            num_processes=num_processes,
            output=output,
            launcher=launcher,
            env=env,
        ) as job:
            if during is not None:
                during(job)
            if kill_after is None:
                status = job.wait(1200)
                return Ended(status, job.text(), log)
            assert job.wait_until(reached, timeout=1200), job.text()[-4000:]
            assert job.kill() >= num_processes
            return Ended(None, job.text(), log)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, data_yaml: Path) -> Runs:
    """``runs(name, flags, num_processes=2, launcher="env", kill_after=None) -> Ended``."""
    return Runs(tmp_path_factory.mktemp("runs"), data_yaml)
