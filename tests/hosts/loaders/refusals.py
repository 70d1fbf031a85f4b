"""What cannot be restored exactly is refused: run by one process over a checkpoint of two. See test_deepspeed.py."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import kit  # noqa: E402
import torch.utils.data  # noqa: E402
import toy  # noqa: E402
from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd  # noqa: E402

import megaresume  # noqa: E402
from megaresume.hosts.deepspeed.attach import attach_loader  # noqa: E402

save = toy.ROOT / "killed"
toy.start()
found: dict[str, Any] = {}


def loads(directory: Path, dp: int = 2, **options: Any) -> list[str]:
    engine = toy.engine_of(micro=2, batch=4)
    from megaresume.hosts.deepspeed import training_data

    data_size, training_data.facts.data_size = training_data.facts.data_size, lambda engine: dp
    try:
        megaresume.attach(engine, options.pop("loader", None) or kit.energon_loader(toy.DATA, world=2, **options))
        return toy.error_of(lambda: engine.load_checkpoint(str(directory)))
    finally:
        training_data.facts.data_size = data_size


def copy(name: str) -> Path:
    return Path(shutil.copytree(save, toy.ROOT / name))


found["dp"] = loads(save, dp=1)
found["workers"] = loads(save, workers=1)
found["batch_size"] = loads(save, batch_size=1)
found["kind"] = loads(save, loader=kit.torchdata_loader("map", workers=2))

damaged = copy("damaged")
states = sorted((damaged / "megaresume").glob("step_*.loader/rank_*.pkl"))
for state in states:
    state.write_bytes(state.read_bytes()[:-1] + b"?")
found["damaged"] = loads(damaged)
missing = copy("missing")
for state in (missing / "megaresume").glob("step_*.loader/rank_00001.pkl"):
    state.unlink()
found["missing"] = loads(missing)

engine = toy.engine_of(micro=2, batch=4)
engine.load_checkpoint(str(save))
data = megaresume.attach(engine, kit.torchdata_loader("map"))
found["attached_late"] = toy.error_of(lambda: next(data))
found["no_state"] = toy.error_of(
    lambda: megaresume.attach(toy.engine_of(micro=2, batch=4), torch.utils.data.DataLoader([1, 2]))
)
of_rank_1 = megaresume.DataLoader(torch.arange(10), batch_size=2, dp_rank=1, dp_size=2)
found["rank"] = toy.error_of(lambda: megaresume.attach(toy.engine_of(micro=2, batch=2), of_rank_1))
sampling = {"enabled": True, "curriculum_learning": {"enabled": True, "curriculum_metrics": {"length": {}}}}
curriculum = {"enabled": True, "data_sampling": sampling}
items = megaresume.DataLoader(torch.arange(10), batch_size=2)
found["curriculum"] = toy.error_of(
    lambda: megaresume.attach(toy.engine_of(micro=2, batch=2, data_efficiency=curriculum), items)
)


def random_ltd(wraps: bool) -> list[str]:
    routing = {"enabled": True, "random_ltd": LTD}
    engine = toy.engine_of(micro=2, batch=2, data_efficiency={"enabled": True, "data_routing": routing})
    if wraps:
        convert_to_random_ltd(engine, torch.nn.Linear)
    data = megaresume.attach(engine, megaresume.DataLoader(torch.zeros(10, 4, dtype=torch.int64), batch_size=2))
    loaded = toy.error_of(lambda: engine.load_checkpoint(str(toy.ROOT / "random_ltd")))
    if not wraps:
        engine.backward(engine(next(data)).sum())
        engine.step()
        engine.save_checkpoint(str(toy.ROOT / "random_ltd"))
    return loaded


LTD = {
    "enabled": True,
    "total_layer_num": 2,
    "random_ltd_layer_num": 1,
    "random_ltd_layer_id": [1],
    "model_mask_name": None,
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 2,
        "max_value": 4,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 4, "seq_per_step": 2},
    },
}
found["random_ltd_begins"], found["random_ltd_resumes"], found["random_ltd"] = map(random_ltd, (False, False, True))
without_accumulation = megaresume.DataLoader(torch.arange(10), batch_size=2)
found["sizes"] = toy.error_of(lambda: megaresume.attach(toy.engine_of(micro=2, batch=4), without_accumulation))
engine = toy.engine_of(micro=2, batch=2)
data = attach_loader(engine, None)  # as on a rank that receives its batches from another one
for _ in range(3):
    engine.backward(engine(torch.zeros(2, 4, dtype=torch.int64)).sum())
    engine.step()
forwards = data._witness.graphs
found["no_loader"] = toy.error_of(lambda: next(data))
found["option"] = toy.error_of(lambda: megaresume.attach(engine, kit.torchdata_loader("map"), log_samples=save))
toy.result("refusals", found)
toy.result("forwards", forwards)
os._exit(0)
