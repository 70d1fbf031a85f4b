"""VeRL's trainers of reinforcement learning, on CPUs, with rollouts of a tiny model: all else is VeRL's own.

python rl_program.py DIRECTORY JSON-OPTIONS
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
import verl  # noqa: F401  which imports the next one, and exact_prompts

import tiny_rollout  # isort: skip
from hydra import compose, initialize_config_dir
from verl.experimental.fully_async_policy.fully_async_main import FullyAsyncTaskRunner
from verl.experimental.one_step_off_policy.main_ppo import OneStepTaskRunner
from verl.trainer import main_ppo, main_ppo_v0
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1 import PPOTrainer

import megaresume


def settings(directory: Path, *, mode: str, steps: int, batch: int, stale: int, more: list[str]) -> list[str]:
    """Of VeRL's config."""
    actor, roll = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        f"data.train_batch_size={batch}",
        "data.train_max_samples=400",
        "data.val_max_samples=4",
        f"data.custom_cls.path={Path(__file__).with_name('tiny_prompts.py')}",
        "data.custom_cls.name=Numbers",
        "data.seed=5",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={directory / 'model'}",
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        f"{actor}.strategy=fsdp2",
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{actor}.fsdp_config.strategy=fsdp2",
        f"{actor}.ppo_mini_batch_size={batch}",
        f"{actor}.ppo_micro_batch_size_per_gpu=4",
        f"{actor}.use_dynamic_bsz=False",
        f"{roll}.name=tiny",
        f"{roll}.n=4",
        f"{roll}.log_prob_micro_batch_size_per_gpu=4",
        f"{roll}.prompt_length=8",
        f"{roll}.response_length=8",
        f"{roll}.tensor_model_parallel_size=1",
        f"{roll}.calculate_log_probs=True",
        f"{roll}.agent.num_workers=1",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={tiny_rollout.__file__}",
        "algorithm.adv_estimator=grpo",
        f"trainer.total_training_steps={steps}",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.device=cpu",
        "trainer.logger=[console]",
        "trainer.val_before_train=False",
        "trainer.save_freq=3",
        f"trainer.default_local_dir={directory / 'run'}",
        f"trainer.use_v1={mode not in OLD}",
        *([] if mode in OLD else [f"trainer.v1.trainer_mode={mode}"]),
        f"trainer.v1.sampler.max_off_policy_threshold={stale}",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "ray_kwargs.ray_init.num_cpus=64",
        "+ray_kwargs.ray_init.num_gpus=2",
        "+ray_kwargs.ray_init.include_dashboard=False",
        f"+ray_kwargs.ray_init._temp_dir={os.environ['TINY_RAY']}",
        *(beside(roll) if mode in ("fully_async", "one_step_off") else []),
        *(
            [
                "data.train_batch_size=0",
                "data.gen_batch_size=1",
                "async_training.staleness_threshold=1",
                "async_training.trigger_parameter_sync_step=1",
                f"rollout.total_rollout_steps={steps * batch}",
            ]
            if mode == "fully_async"
            else []
        ),
        *(["hydra.searchpath=[pkg://verl.trainer.config]"] if mode == "one_step_off" else []),
        *more,
    ]


#: those of `trainer.use_v1=False`.
OLD = ("old", "fully_async", "one_step_off")


def beside(roll: str) -> list[str]:
    """A rollout that is not in the process that trains, and is sent its weights."""
    return [
        "actor_rollout_ref.hybrid_engine=False",
        f"{roll}.checkpoint_engine.backend=tiny",
        f"{roll}.checkpoint_engine.custom_backend_module=tiny_engine",
        f"{roll}.nnodes=1",
        f"{roll}.n_gpus_per_node=1",
    ]


class _Runner:
    """VeRL's own, with the recorder, and megaresume if it is asked for, in its process."""

    def run(self, config: Any) -> None:
        """As VeRL calls it."""
        tiny_rollout.record_saves()
        if "TINY_ATTACH" in os.environ and "exact_prompts" not in sys.modules:
            for trainer in (PPOTrainer, RayPPOTrainer):
                megaresume.attach(trainer, **json.loads(os.environ["TINY_ATTACH"]))
        super().run(config)  # type: ignore[misc]


class Runner(_Runner, main_ppo.TaskRunnerV1.__ray_metadata__.modified_class):
    """Of ``PPOTrainer``."""


class OldRunner(_Runner, main_ppo_v0.TaskRunner.__ray_metadata__.modified_class):
    """Of ``RayPPOTrainer``."""


class OneStepRunner(_Runner, OneStepTaskRunner.__ray_metadata__.modified_class):
    """Of ``OneStepOffRayTrainer``."""


class FullyAsyncRunner(_Runner, FullyAsyncTaskRunner.__ray_metadata__.modified_class):
    """Of ``FullyAsyncTrainer`` and ``FullyAsyncRollouter``."""


RUNNERS = {"old": OldRunner, "one_step_off": OneStepRunner, "fully_async": FullyAsyncRunner}
CONFIGS = {
    "one_step_off": ("verl.experimental.one_step_off_policy", "one_step_off_ppo_trainer"),
    "fully_async": ("verl.experimental.fully_async_policy", "fully_async_ppo_trainer"),
}


def main(
    directory: Path, *, mode: str, steps: int = 20, batch: int = 4, stale: int = 2, more: list[str] | None = None
) -> None:
    """Train to the end."""
    module, name = CONFIGS.get(mode, ("verl.trainer", "ppo_trainer"))
    found = settings(directory, mode=mode, steps=steps, batch=batch, stale=stale, more=more or [])
    directories = importlib.import_module(module).__path__
    with initialize_config_dir(str(Path(directories[0], "config")), version_base=None):
        config = compose(name, found)
    runner = ray.remote(num_cpus=10, max_concurrency=100)(RUNNERS.get(mode, Runner))
    main_ppo.run_ppo(config, task_runner_class=runner)


if __name__ == "__main__":
    import rl_program  # not __main__: Ray's workers import it

    sys.executable = os.environ.get("TINY_PYTHON", sys.executable)
    rl_program.main(Path(sys.argv[1]), **json.loads(sys.argv[2]))
