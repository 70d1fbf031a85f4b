"""A Megatron-LM script under the launcher, under the contract of all hosts: megatron-core is the real one, its training
package the stand-in of `tests/hosts/megatron/mini`. An item is a document, and a sample of the stream; or one of a
`megaresume.DataLoader`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megaresume
from megaresume.hosts.contract import HostContract
from megaresume.hosts.driver import Driver, Job, write_down
from tests.cli.conftest import megaresume as megaresume_program
from tests.corpora import write_corpus
from tests.hosts.contract.forking import ForkingDriver, ask_to_stop, main, stop_of

pytestmark = pytest.mark.process

MINI = Path(__file__).parents[1] / "megatron" / "mini"
BASE, LENGTH = 32, 8


class Model(torch.nn.Module):
    """With dropout. Its random state is in the checkpoint as Megatron's is, which the stand-in leaves out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = torch.nn.Embedding(BASE, 16)
        self.body = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, BASE))
        self.register_buffer("random", torch.get_rng_state())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        torch.set_rng_state(self.random)
        loss = torch.nn.functional.cross_entropy(self.body(self.words(tokens)).flatten(0, 1), tokens.flatten())
        self.random.copy_(torch.get_rng_state())
        return loss


class Items(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Item i holds i, in its first two tokens."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.tensor([i // BASE, i % BASE, *(i * k % BASE for k in range(2, LENGTH))])}


def data_flags(job: Job) -> list[Any]:
    """Those of a data config. Document i is what item i is."""
    web = job.directory.with_name("web")
    if dist.get_rank() == 0:
        write_corpus(
            web, [[[i // BASE, i % BASE, *(i * k % BASE for k in range(2, LENGTH))]] for i in range(job.items)]
        )
        source = {"path": str(web)} | ({} if job.append is None else {"append": job.append})
        data = {"seed": 7, "seq_length": LENGTH, "packing": "none", "sources": {"web": source}}
        web.with_suffix(".yaml").write_text(json.dumps(data))
    dist.barrier()
    return ["--split", "100,0,0", "--megaresume-data", web.with_suffix(".yaml")]


def flags(job: Job, *, items: bool) -> list[str]:
    """Of the script."""
    words: list[Any] = ["--seed", 7, "--seq-length", LENGTH, "--vocab-size", BASE, "--train-iters", job.steps]
    words += ["--micro-batch-size", job.batch, "--global-batch-size", job.batch * job.accumulation * job.ranks]
    words += ["--save", job.directory, "--save-interval", job.save_every, "--lr", 0.1]
    words += ["--dataloader-type", "external", "--eval-iters", 0] if items else data_flags(job)
    words += [] if job.mistake == "load" else ["--load", job.directory]
    words += ["--megaresume-stage-to", job.stage_to] if job.stage_to else []
    stop = stop_of(job)
    words += [] if stop is None else ["--megaresume-stop-file", stop.file]
    return [str(word) for word in words]


def train(job: Job) -> None:
    """By the stand-in's own ``pretrain``, with the hooks of ``megaresume.run``."""
    sys.path.insert(0, str(MINI))
    import pretrain_until_0_17 as script
    from megatron.core import mpu
    from megatron.training import pretrain
    from megatron.training.global_vars import get_args
    from mini_model import ModelType

    items, provider = "items" in sys.argv, script.train_valid_test_datasets_provider
    sys.argv[1:] = flags(job, items=items)

    def loaders(train_val_test_num_samples: Any, vp_stage: Any = None) -> tuple[Any, None, None]:
        loader = megaresume.DataLoader(
            Items(job.items),
            job.batch,
            accumulation=job.accumulation,
            seed=7,
            append=job.append,
            num_workers=job.attempt - 1,
            dp_rank=mpu.get_data_parallel_rank(),
            dp_size=mpu.get_data_parallel_world_size(),
        )
        return loader, None, None

    if items:
        provider = loaders
    where, step = job.kill
    if where:  # a step is killed when the next one has read its batch
        os.environ["MINI_KILL"] = f"files:{step}" if where == "save" else f"step:{step + 1}"
    read = 0

    def forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, list[Any]]:
        nonlocal read
        if job.mistake == "look" and read == 0:
            next(iterator)
        tokens = next(iterator)["tokens"]
        loss = model(tokens)
        step = get_args().iteration + 1 + read // job.accumulation
        numbers = (tokens[:, 0] * BASE + tokens[:, 1]).tolist()
        write_down(job.directory, dist.get_rank(), attempt=job.attempt, step=step, items=numbers, loss=loss.item())
        read += 1
        if read % job.accumulation == 0:
            ask_to_stop(job, step)
        return loss, []

    pretrain(provider, lambda **_: Model(), ModelType.encoder_or_decoder, forward_step)


class TestMegatron(HostContract):
    short_last_step = False  # a stream has no end
    grown, other = "has grown by 10 documents", "web.documents 99"
    random_state = ""  # Megatron restores it

    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls) -> Driver:
        return ForkingDriver(__file__, train, in_process=False, launcher="megaresume.run")


class TestItems(TestMegatron):
    grown, other = HostContract.grown, HostContract.other

    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls) -> Driver:
        return ForkingDriver(__file__, train, in_process=False, launcher="megaresume.run", words=["items"])

    def test_verify_proves_a_run_that_changed_its_ranks(self, driver: Driver, copy: Path) -> None:
        self.ended(driver, self.again(copy))
        verified = megaresume_program("verify", copy)
        assert verified.returncode == 0 and "proved: all" in verified.stdout, verified.stdout + verified.stderr


if __name__ == "__main__":
    del __file__  # or the process that megatron-core spawns for a queue would import all this again
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(train)
