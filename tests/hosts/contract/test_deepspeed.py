"""A DeepSpeed engine, under the contract of all hosts: an item is a document, and a sample of the stream; or one of a
`megaresume.DataLoader`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megaresume
from megaresume.hosts.contract import HostContract
from megaresume.hosts.driver import Driver, Job, items, lines, trained, write_down
from tests.cli.conftest import megaresume as megaresume_program
from tests.corpora import write_corpus
from tests.hosts.contract.forking import ForkingDriver, ask_to_stop, die_if_asked, main, staged, stop_of

pytestmark = pytest.mark.process

BASE, LENGTH = 32, 8


def data_of(job: Job) -> dict[str, Any]:
    """Document i holds i, in its first two tokens."""
    web = job.directory.with_name("web")
    if dist.get_rank() == 0:
        write_corpus(
            web, [[[i // BASE, i % BASE, *(i * k % BASE for k in range(2, LENGTH))]] for i in range(job.items)]
        )
    dist.barrier()
    source = {"path": str(web)} | ({} if job.append is None else {"append": job.append})
    return {"seed": 7, "seq_length": LENGTH, "packing": "none", "sources": {"web": source}}


def loader_of(job: Job) -> megaresume.DataLoader:
    """Item i is what document i is, with workers if the run was killed before."""
    dataset = torch.tensor([[i // BASE, i % BASE, *(i * k % BASE for k in range(2, LENGTH))] for i in range(job.items)])
    if (rank := dist.get_rank()) and "parts" in sys.argv:
        dataset += 1
    elif rank and "sizes" in sys.argv:
        dataset = dataset[1:]
    return megaresume.DataLoader(
        Items(dataset),
        job.batch,
        accumulation=job.accumulation,
        seed=7,
        append=job.append,
        num_workers=job.attempt - 1,
    )


class Items(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows, each of them a batch's tokens."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": self.rows[index]}


class Model(torch.nn.Module):
    """With dropout; writes down what it reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = torch.nn.Embedding(BASE, 16)
        self.body = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, BASE))
        self.read: list[int] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.read = (tokens[:, 0] * BASE + tokens[:, 1]).tolist()
        return torch.nn.functional.cross_entropy(self.body(self.words(tokens)).flatten(0, 1), tokens.flatten())


def train(job: Job) -> None:
    """By a loop around an engine, which says that it has come to its end."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": job.batch,
        "train_batch_size": job.batch * job.accumulation * job.ranks,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "steps_per_print": 1 << 40,
    }
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    checkpoints = megaresume.Checkpoints(save_dir=job.directory, **staged(job))
    given = loader_of(job) if sys.argv[2:] else data_of(job)
    data = megaresume.attach(engine, given, checkpoints=checkpoints, stop=stop_of(job))
    if job.mistake != "load":
        engine.load_checkpoint(str(job.directory))
    if job.mistake == "look":
        next(data)
    while (step := engine.global_steps) < job.steps:
        if "looks" in sys.argv and engine.micro_steps % job.accumulation == 0:
            shown, taken = data.peek()["tokens"], next(data)["tokens"]
            iter(data)  # which is then handed out again
            assert torch.equal(shown, taken) and torch.equal(shown, data.peek()["tokens"])
        loss = engine(next(data)["tokens"])
        line = {"attempt": job.attempt, "step": step + 1, "items": model.read, "loss": loss.item()}
        write_down(job.directory, dist.get_rank(), **line)
        engine.backward(loss)
        engine.step()
        if (made := engine.global_steps) == step:
            continue
        die_if_asked(job, made)
        ask_to_stop(job, made)
        if made % job.save_every == 0 or made == job.steps:
            if job.kill == ("save", made):
                torch.save = die  # type: ignore[assignment]
            engine.save_checkpoint(str(job.directory))
    data.session.finish()
    data.close()


def die(state: Any, path: str, *args: Any, **more: Any) -> None:
    """In the middle of a file."""
    Path(path).write_bytes(b"half of it")
    os.kill(os.getpid(), signal.SIGKILL)


class TestDeepSpeed(HostContract):
    short_last_step = False  # a stream has no end
    grown, other = "has grown by 10 documents", "web.documents 99"

    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls) -> Driver:
        return ForkingDriver(__file__, train, in_process=False)


class TestItems(TestDeepSpeed):
    grown, other = HostContract.grown, HostContract.other

    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls) -> Driver:
        return ForkingDriver(__file__, train, in_process=False, words=["items"])

    @pytest.mark.parametrize("how", ["parts", "sizes"])
    def test_each_rank_has_its_own_items(self, tmp_path: Path, how: str) -> None:
        driver = ForkingDriver(__file__, train, in_process=False, words=[how])
        self.refused(driver, self.of_ranks(directory=tmp_path / "run"), "the ranks disagree on the data")
        assert not lines(tmp_path / "run")

    def test_batches_that_are_looked_at_come_again(self, tmp_path: Path, order: list[int]) -> None:
        driver = ForkingDriver(__file__, train, in_process=False, words=["looks"])
        self.ended(driver, self.of_one(directory=tmp_path / "run"))
        assert items(trained(tmp_path / "run")) == order

    def test_verify_proves_a_run_that_changed_its_ranks(self, driver: Driver, copy: Path) -> None:
        self.ended(driver, self.again(copy))
        verified = megaresume_program("verify", copy)
        assert verified.returncode == 0 and "proved: all" in verified.stdout, verified.stdout + verified.stderr


if __name__ == "__main__":
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo", verbose=False)
    main(train)
