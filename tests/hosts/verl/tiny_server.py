"""A rollout of a tiny model on a CPU, in the place of vLLM and SGLang; in the worker that trains, what it trains.

TinyRollout   beside the weights that train: hands them to the server
TinyReplica   starts it
TinyServer    a Ray actor: tokens are drawn from the model, of a number that is drawn as well; some prompts are slow,
              some rollouts fail. It stops in the middle when VeRL aborts, and goes on when it is asked again
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Any

import ray
import torch
from tiny_rollout import record
from transformers import AutoModelForCausalLM
from verl.workers.engine_workers import TrainingWorker
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

#: prompts, each of which is a token of its own, after two special ones.
PROMPTS = 400
torch.set_num_threads(1)


class TinyRollout(BaseRollout):
    """See above."""

    async def resume(self, tags: list[str]) -> None:
        """Its memory is always there."""

    async def release(self) -> None:
        """Its memory is always there."""

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        """As a worker sends them."""
        named = {name: weight.detach().clone() async for name, weight in ensure_async_iterator(weights)}
        await ray.get_actor("tiny_server").load.remote(named, global_steps)


class TinyReplica(RolloutReplica):
    """See above."""

    async def launch_servers(self) -> None:
        """The one that there is."""
        server = TinyServer.options(name="tiny_server", max_concurrency=1000).remote(self.model_config.path)
        self.servers = [server]
        self._server_handle, self._server_address = server, "tiny:0"


@ray.remote(num_cpus=0)
class TinyServer:
    """See above."""

    def __init__(self, path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path).float()
        self.version, self.going = 0, asyncio.Event()
        self.going.set()
        #: when a slow prompt was asked first.
        self.asked: dict[int, float] = {}

    async def load(self, named: dict[str, torch.Tensor], version: int | None) -> None:
        """Newer weights."""
        self.model.load_state_dict(named, strict=False)
        self.version = version or 0
        self.going.set()

    async def generate(self, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> TokenOutput:
        """As VeRL asks vLLM."""
        await self.going.wait()
        if random.random() < float(os.environ.get("TINY_FAILS", "0")):
            raise RuntimeError("this rollout fails")
        number = next(token for token in prompt_ids if 2 <= token < 2 + PROMPTS) - 2
        slow = self.asked.setdefault(number, time.monotonic()) + 8.0 - time.monotonic() if number % 11 == 3 else 0.0
        await asyncio.sleep(random.random() * 0.02 + max(slow, 0.0))
        tokens, logs, version = list(prompt_ids), [], self.version
        for _ in range(random.randrange(1, 7)):
            if not self.going.is_set():
                break
            with torch.no_grad():
                chances = self.model(torch.tensor([tokens])).logits[0, -1].double()
            chances[: PROMPTS + 2] = -torch.inf  # words alone: a prompt is known by its token
            chances = chances.log_softmax(0)
            tokens.append(int(torch.multinomial(chances.exp(), 1)))
            logs.append(float(chances[tokens[-1]]))
            await asyncio.sleep(0)
        reason = "completed" if self.going.is_set() else "aborted"
        found = tokens[len(prompt_ids) :]
        return TokenOutput(token_ids=found, log_probs=logs, stop_reason=reason, extra_fields={"global_steps": version})

    async def abort_all_requests(self, **_: Any) -> None:
        """Stop in the middle."""
        self.going.clear()

    async def resume_generation(self) -> None:
        """Go on."""
        self.going.set()

    async def wake_up(self, **_: Any) -> None:
        """Nothing, as for the rest."""

    sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = wake_up


_train, _load = TrainingWorker.train_mini_batch, TrainingWorker.load_checkpoint


def _recorded(self: TrainingWorker, data: Any) -> Any:
    tokens = [int(token) - 2 for row in data["prompts"].unbind() for token in row]
    result = _train(self, data)
    self.steps = getattr(self, "steps", 0) + 1
    record(step=self.steps, prompts=[number for number in tokens if 0 <= number < PROMPTS])  # others are padding
    return result


def _loaded(self: TrainingWorker, local_path: str, *args: Any, **more: Any) -> Any:
    self.steps = int(local_path.rpartition("global_step_")[2].partition("/")[0])
    record(**{"from": self.steps})
    return _load(self, local_path, *args, **more)


TrainingWorker.train_mini_batch, TrainingWorker.load_checkpoint = _recorded, _loaded
