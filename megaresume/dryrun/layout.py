"""Ranks and batches of the launch, and whether they go together."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from megaresume.checkpoint.choose import Choice
from megaresume.checkpoint.topology import Topology
from megaresume.dryrun.findings import Finding, attempt
from megaresume.dryrun.flags import Flags
from megaresume.integrations.loadable import check_zero
from megaresume.integrations.megatron.schedule import schedule_from_args
from megaresume.stream.batches import BatchSchedule, check_sizes
from megaresume.stream.errors import UsageError

__all__ = ["check_layout", "planned_sizes", "topology"]


def topology(before: Topology, flags: Flags) -> Topology:
    """How the launch is laid out.

    Raises:
        UsageError: nodes are given, and how many ranks they have is not known; or they do not divide.
    """
    model = before.tp * before.pp * before.cp
    dp, nodes = flags.dp, flags.nodes
    if dp is None and nodes is not None:
        if before.nodes is None or before.world_size % before.nodes:
            raise UsageError(
                "how many ranks a node has is not recorded",
                found=f"--nodes {nodes}; the checkpoint was saved by {before.world_size} ranks",
                expected="the data-parallel size",
                action="--dp D in place of --nodes",
            )
        world = nodes * (before.world_size // before.nodes)
        if world % model:
            raise UsageError(
                "the ranks do not divide over model parallelism",
                found=f"{nodes} nodes with {before.world_size // before.nodes} ranks each",
                expected=f"a multiple of {model} ranks: tp {before.tp}, pp {before.pp}, cp {before.cp}",
                action="another number of --nodes",
            )
        dp = world // model
    now = before.dp if dp is None else dp
    return replace(
        before,
        dp=now,
        world_size=now * model,
        nodes=nodes if nodes is not None else before.nodes if now == before.dp else None,
        num_workers=before.num_workers if flags.num_workers is None else flags.num_workers,
        micro_batch_size=flags.micro_batch_size or before.micro_batch_size,
        global_batch_size=flags.global_batch_size or before.global_batch_size,
        zero_stage=before.zero_stage if flags.zero_stage is None else flags.zero_stage,
    )


def planned_sizes(now: Topology, flags: Flags, *, is_megatron: bool) -> BatchSchedule | None:
    """The global batch sizes that the flags mean, from sample 0; None: not known.

    Raises:
        UsageError: a bad ramp-up.
    """
    if now.global_batch_size is None:
        return None
    if flags.rampup_batch_size is None:
        return BatchSchedule.constant(now.global_batch_size)
    if is_megatron:
        sizes = SimpleNamespace(global_batch_size=now.global_batch_size, rampup_batch_size=flags.rampup_batch_size)
        return schedule_from_args(sizes)
    return BatchSchedule.ramp_up(*flags.rampup_batch_size, now.global_batch_size)


def check_layout(
    choice: Choice, now: Topology, schedule: BatchSchedule | None, sample: int, flags: Flags, findings: list[Finding]
) -> None:
    """Batches over ranks, and ZeRO's partitions."""
    micro = now.micro_batch_size
    if schedule is not None and micro is not None:
        sizes = schedule
        attempt(lambda: check_sizes(sizes, sample, micro_batch_size=micro, dp_size=now.dp), findings)
    before = None if choice.step is None else choice.step.topology
    attempt(
        lambda: check_zero(
            choice,
            before,
            partitions=now.dp * now.cp,
            zero_stage=now.zero_stage or 0,
            universal=flags.universal_checkpoint,
            elastic=flags.elastic,
        ),
        findings,
    )
