"""Whether the loaders of a loop suit how its models are divided: data, tensor and pipeline parallelism.

`check_averaged` compares their numbers with the processes over which gradients are averaged, and `check_together` with
those that train the same samples together. Context parallelism cannot be seen in a model.

FSDP2 also keeps parameters and gradients where a save does not look: see `reshard` and `unreduced`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from megaresume.checkpoint.ranks import gather, known_to_all
from megaresume.hosts.feeds import LEAVE_OUT
from megaresume.hosts.unsaved import living_objects
from megaresume.stream.errors import UsageError, listed


def check_averaged(modules: Iterable[torch.nn.Module], dp_size: int, context_parallel: int) -> None:
    """Refuse a model whose gradients are averaged over processes that train the same samples.

    Args:
        modules: on this rank, wrapped.
        dp_size: that of its loader.
        context_parallel: number of processes that train the same samples together, and whose gradients are averaged
            nevertheless.

    Raises:
        UsageError: DDP or FSDP averages over more processes than the loaders deal samples to; or FSDP1.
    """
    averaged = max((_averaged(part) for part in _parts(modules)), default=1)
    if averaged > dp_size * context_parallel:
        raise UsageError(
            "every sample would be trained by several processes",
            found=f"DDP or FSDP over {averaged} processes, and a loader with dp_size={dp_size}",
            expected=f"dp_size={averaged // context_parallel}",
            cause="dp_rank and dp_size are those of a node or of one dimension of a mesh, or were written down",
            action=f"{LEAVE_OUT}; if processes train the same samples together: attach(..., context_parallel=...)",
        )


def check_together(modules: Sequence[torch.nn.Module], dp_rank: int) -> None:
    """Refuse loaders that deal different samples to processes of one tensor-parallel or pipeline group. Collective.

    Args:
        modules: on this rank, wrapped.
        dp_rank: that of its loader.

    Raises, on every rank:
        UsageError: names the first such group.
    """
    answers = gather((dp_rank, [*_tensor_groups(modules), *_pipeline_groups(modules)]))
    for kind, ranks in (group for _, groups in answers for group in groups):
        if len({answers[rank][0] for rank in ranks}) > 1:
            error = UsageError(
                f"processes of one {kind} group would train different samples",
                found=listed([f"process {rank}: dp_rank={answers[rank][0]}" for rank in ranks], 8),
                expected="the same dp_rank in all of them",
                cause="dp_rank and dp_size were left out: then every process of torch.distributed has samples of its "
                "own",
                action="give the loader those of the mesh: dp_rank=mesh['dp'].get_local_rank(), "
                "dp_size=mesh['dp'].size(); without data parallelism, dp_rank=0, dp_size=1",
            )
            raise known_to_all(error)


def _averaged(module: torch.nn.Module) -> int:
    """The number of processes over which a module's gradients are averaged; 1: it is not itself wrapped."""
    if isinstance(module, DistributedDataParallel):
        return dist.get_world_size(module.process_group)
    if isinstance(module, FullyShardedDataParallel):
        raise UsageError(
            "FSDP1 cannot be used in your own loop",
            found="a module in torch.distributed.fsdp.FullyShardedDataParallel",
            expected="DDP, FSDP2 or neither",
            cause="what its state dict holds cannot be saved while training continues",
            action="torch.distributed.fsdp.fully_shard(model)",
        )
    return max((_mesh_size(group.mesh_info) for group in _fsdp_groups(module)), default=1)


def _fsdp_groups(module: torch.nn.Module) -> list[Any]:
    """FSDP2's groups of parameters that this module itself has; empty if it is not wrapped."""
    if not isinstance(module, FSDPModule):
        return []
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def reshard(modules: Iterable[torch.nn.Module]) -> None:
    """Let FSDP2's modules have their shards as parameters, as their optimizers do: a forward pass without a backward
    pass, as of an evaluation, leaves some with whole ones.
    """
    for part in _parts(modules):
        if isinstance(part, FSDPModule):
            part.reshard()


def unreduced(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """The parameters whose gradients of some micro-batches FSDP2 keeps for itself until a backward pass that reduces
    them, as after ``set_requires_gradient_sync(False)``.
    """
    return [
        parameter.sharded_param
        for group in _all_fsdp_groups(modules)
        for parameter in group.fsdp_params
        if any(
            one is not None
            for one in (
                getattr(parameter, "unsharded_accumulated_grad", None),
                getattr(getattr(parameter, "_unsharded_param", None), "grad", None),
                getattr(group, "_partial_reduce_output", None),
            )
        )
    ]


def discard_unreduced(modules: Iterable[torch.nn.Module]) -> None:
    """Drop the gradients of `unreduced`, which ``zero_grad`` does not."""
    for group in _all_fsdp_groups(modules):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(parameter):  # a property in torch 2.15
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def _parts(modules: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """These modules and all modules in them."""
    return (part for module in modules for part in module.modules())


def _all_fsdp_groups(modules: Iterable[torch.nn.Module]) -> Iterator[Any]:
    return (group for part in _parts(modules) for group in _fsdp_groups(part))


def _mesh_size(info: Any) -> int:
    """The size of the dimensions over which FSDP2 shards and replicates."""
    return int(getattr(info, "shard_mesh_size", 1)) * int(getattr(info, "replicate_mesh_size", 1))


def _tensor_groups(modules: Sequence[torch.nn.Module]) -> set[tuple[str, tuple[int, ...]]]:
    """The ranks over which layers are divided by torch's ``parallelize_module``: of the dimensions of a parameter's
    mesh, FSDP2's come first. Only layers that it divides: the experts of expert parallelism have other samples.
    """
    #: of a parameter, by its module and name: the number of dimensions that are FSDP2's.
    sharded = {
        (id(holder), name): group.mesh_info.mesh.ndim
        for group in _all_fsdp_groups(modules)
        for info in (parameter._module_info for parameter in group.fsdp_params)
        for holder, name in zip(  # tied weights have several
            [info.module, *info.shared_modules], [info.param_name, *info.shared_param_names], strict=True
        )
    }
    groups = set()
    for part in _parts(modules):
        weight: Any = part._parameters.get("weight")
        if not isinstance(part, (torch.nn.Linear, torch.nn.Embedding)) or not hasattr(weight, "placements"):
            continue
        first, mesh = sharded.get((id(part), "weight")), weight.device_mesh
        if first is None and not (mesh.ndim == 1 and getattr(part, "_distribute_module_applied", False)):
            continue  # not marked before torch 2.7; or FSDP2's, of a model around these modules
        first, own = first or 0, mesh.get_coordinate()
        divided = [i for i in range(first, mesh.ndim) if weight.placements[i].is_shard()]
        if divided and own is not None:
            place = tuple(slice(None) if i in divided else own[i] for i in range(mesh.ndim))
            groups.add(("tensor-parallel", tuple(mesh.mesh[place].flatten().tolist())))
    return groups


def _pipeline_groups(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The ranks of the pipelines of ``torch.distributed.pipelining`` that these modules are stages of."""
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    if pipelining is None:
        return
    own = {id(parameter) for module in modules for parameter in module.parameters()}
    for stage in living_objects(lambda kind: issubclass(kind, pipelining._PipelineStageBase)):
        if not own.isdisjoint(id(parameter) for parameter in stage.submod.parameters()):
            group = dist.group.WORLD if stage.group is None else stage.group
            yield "pipeline", tuple(dist.get_process_group_ranks(group))
