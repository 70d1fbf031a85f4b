"""A loop under Ray Train, which starts its workers again with as many as the cluster has room for.

    python ray_train.py DIRECTORY JSON-OPTIONS

A cluster of a head and two nodes on this machine, with room for a worker each: one node is killed, and one comes.
Each change is made once the workers of the one before have trained; when all were, the file ``ended`` is made, at which
the loops stop.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray.cluster_utils import Cluster

from tests.hosts.restarts import program


class Over(Exception):
    """What ends a loop."""


def train(config: dict[str, Any]) -> None:
    """In each worker."""
    directory = Path(config.pop("directory"))

    def fail(step: int, happens: str) -> None:
        if happens == "step" and (directory / "ended").exists():
            raise Over

    with contextlib.suppress(Over):
        program.loop(directory, fail=fail, **config)


def wait(directory: Path, ranks: int, beyond: int) -> int:
    """Until so many ranks have made a step beyond this one; returns it."""
    deadline = time.monotonic() + 540
    while time.monotonic() < deadline:
        if (step := program.newest_step(program.lines_of(directory), ranks)) > beyond:
            return step
        time.sleep(0.1)
    raise TimeoutError(f"no {ranks} ranks beyond step {beyond}")


def main(directory: Path, **options: Any) -> None:
    """Two workers, one, two."""
    (directory / "record").mkdir(parents=True, exist_ok=True)
    head = {"num_cpus": 2, "resources": {"room": 1}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [None, cluster.add_node(num_cpus=1, resources={"room": 1})]
    ray.init(address=cluster.address, log_to_driver=True)
    scaling = ray.train.ScalingConfig(
        num_workers=(1, 2), resources_per_worker={"CPU": 1, "room": 1}, elastic_resize_monitor_interval_s=5
    )
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"directory": str(directory), **options},
        scaling_config=scaling,
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        run_config=ray.train.RunConfig(
            storage_path=str(directory / "ray"), name="run", failure_config=ray.train.FailureConfig(max_failures=20)
        ),
    )
    errors: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    reached = wait(directory, ranks=2, beyond=4)
    cluster.remove_node(nodes[1], allow_graceful=False)
    reached = wait(directory, ranks=1, beyond=reached)
    cluster.add_node(num_cpus=1, resources={"room": 1})
    reached = wait(directory, ranks=2, beyond=reached)
    (directory / "ended").touch()
    thread.join(120)
    print(json.dumps({"reached": reached, "errors": [str(error) for error in errors]}), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), **json.loads(sys.argv[2]))
