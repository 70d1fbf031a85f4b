"""Run by test_checkpointing.py, with some megatron-core on the path: does our string come back from every format?

usage: formats.py DIRECTORY; prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from argparse import Namespace
from pathlib import Path

import torch

warnings.filterwarnings("ignore")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
torch.cuda.synchronize = lambda *_: None  # made whatever the tensors lie on
torch.cuda.current_device = lambda: torch.device("cpu")


def main(directory: Path) -> None:
    """Save and load the same state dict in each format."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=0, world_size=1)
    import megatron.core
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    _write_as_before()
    text = os.environ["STATE"]
    args = Namespace(megaresume_state=text, consumed_train_samples=320, iteration=0, load=None)
    found = {"version": megatron.core.__version__}

    def state_dict(weights: object) -> dict[str, object]:
        return {"args": args, "iteration": 10, "checkpoint_version": 3.0, "model": {"w": weights}}

    # torch_dist
    path = directory / "iter_0000010"
    path.mkdir()
    sharded = ShardedTensor.from_rank_offsets("w", torch.ones(4))
    dist_checkpointing.save(state_dict(sharded), str(path))
    common = dist_checkpointing.load_common_state_dict(str(path))
    found["common"] = common["args"].megaresume_state == text
    template = state_dict(ShardedTensor.from_rank_offsets("w", torch.zeros(4)))
    template["args"] = Namespace(megaresume_state="of the run that loads")
    loaded = dist_checkpointing.load(template, str(path))
    found["torch_dist"] = loaded["args"].megaresume_state == text
    found["weights"] = bool((loaded["model"]["w"] == 1).all())
    found["files"] = sorted(file.name for file in path.iterdir())

    # torch: the default of torch.load, with the classes that this core allows
    try:
        import megatron.core.safe_globals
    except ImportError:
        torch.serialization.add_safe_globals([Namespace])
    torch.save(state_dict(torch.ones(4)), directory / "model_optim_rng.pt")
    for only in (False, True):
        got = torch.load(directory / "model_optim_rng.pt", map_location="cpu", weights_only=only)
        found[f"torch, weights_only={only}"] = got["args"].megaresume_state == text

    # torch_dcp, and fsdp_dtensor, which is the same for what is no tensor
    import torch.distributed.checkpoint as dcp

    dcp.save(state_dict(torch.ones(4)), storage_writer=dcp.FileSystemWriter(str(directory / "dcp")))
    into = {"args": None, "iteration": 1, "model": {"w": torch.zeros(4)}}
    dcp.load(into, checkpoint_id=str(directory / "dcp"))
    found["torch_dcp"] = into["args"].megaresume_state == text
    into = {"args": Namespace(megaresume_state="of the run that loads"), "model": {"w": torch.zeros(4)}}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(into, checkpoint_id=str(directory / "dcp"), planner=planner)
    found["fsdp_dtensor"] = into["args"].megaresume_state == text
    print("FOUND", json.dumps(found))


def _write_as_before() -> None:
    """0.12 calls a private function of torch that has one more argument in newer ones."""
    import functools
    import inspect

    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from torch.distributed.checkpoint import filesystem

    calls = inspect.getsource(filesystem_async)
    if hasattr(filesystem, "SerializationFormat") and "serialization_format" not in calls:
        form = filesystem.SerializationFormat.TORCH_SAVE
        filesystem_async._write_item = functools.partial(filesystem._write_item, serialization_format=form)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
