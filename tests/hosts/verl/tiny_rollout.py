"""What VeRL's reinforcement learning needs on CPUs; imported by VeRL in each of its processes (with
VERL_USE_EXTERNAL_MODULES), and so light.

A rollout of its own kind, ``tiny``, registered as those of vLLM and SGLang are: see tiny_server.py. And the recorder of
what is handed out, saved and trained, which shares no code with megaresume:

    {"from": 12}                                  weights of this step were loaded
    {"step": 13, "prompts": [7, 7, 91, 91]}       a step has trained rollouts of these prompts
    {"saved": 15, "handed": [..], "open": [..]}   a checkpoint: prompts that its process has sent to be rolled out, and
                                                  has in flight
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import cpu  # noqa: F401  before VeRL
from verl.workers.rollout import base, replica

base._ROLLOUT_REGISTRY["tiny", "async"] = "tiny_server.TinyRollout"


def _replica() -> Any:
    import tiny_server

    return tiny_server.TinyReplica


replica.RolloutReplicaRegistry.register("tiny", _replica)


def record(**line: Any) -> None:
    """Write a line down."""
    with Path(os.environ["TINY_DIRECTORY"], "record.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


#: numbers of the prompts that this process has sent to be rolled out.
handed: list[int] = []


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """A number of words, by which a group differs."""
    return float(len(solution_str.split()) % 3)


def record_rollouter() -> None:
    """In the process that starts the rollouter of a fully asynchronous trainer, which is sent its class."""
    from verl.experimental.fully_async_policy.fully_async_rollouter import FullyAsyncRollouter

    rollouter = FullyAsyncRollouter.__ray_metadata__.modified_class
    save, generate = rollouter.save_checkpoint, rollouter._streaming_generation_main

    async def saved(self: Any, directory: str) -> None:
        import tiny_rollout  # of that process

        await save(self, directory)
        tiny_rollout.record(saved=int(directory.rpartition("_")[2]), handed=tiny_rollout.handed, open=[])

    async def generated(self: Any) -> None:
        import tiny_rollout

        put = self.pending_queue.put

        async def recorded(sample: Any) -> None:
            if sample is not None:
                tiny_rollout.handed.append(int(sample.full_batch.non_tensor_batch["index"][0]))
            await put(sample)

        self.pending_queue.put = recorded
        await generate(self)

    rollouter.save_checkpoint, rollouter._streaming_generation_main = saved, generated


def record_saves() -> None:
    """In the trainer's process, before megaresume is attached."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    def recorded(save: Any, build: Any) -> None:
        def saved(self: Any) -> None:
            save(self)
            record(saved=self.global_steps, handed=handed, open=_in_flight() if build else [])

        return saved

    PPOTrainer._save_checkpoint = recorded(PPOTrainer._save_checkpoint, True)
    RayPPOTrainer._save_checkpoint = recorded(RayPPOTrainer._save_checkpoint, False)
    record_rollouter()
    submit, get = PPOTrainer._submit_batch_to_rollout, RayPPOTrainer._get_gen_batch

    def submitted(self: Any, batch: Any) -> Any:
        handed.extend(int(index) for index in batch["index"])
        return submit(self, batch)

    def got(self: Any, batch: Any) -> Any:
        handed.extend(int(index) for index in batch.non_tensor_batch["index"])
        return get(self, batch)

    PPOTrainer._submit_batch_to_rollout, RayPPOTrainer._get_gen_batch = submitted, got
    build = PPOTrainer._build_replay_buffer

    def quick(self: Any) -> Any:
        buffer = build(self)
        buffer.poll_interval = 0.1
        return buffer

    PPOTrainer._build_replay_buffer = quick


def _in_flight() -> list[int]:
    import transfer_queue as tq

    items = (tq.kv_list("train") or {}).get("train", {})
    keys = [key for key, tag in items.items() if tag.get("is_prompt")]
    if not keys:
        return []
    return [int(index) for index in tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["index"])["index"]]
