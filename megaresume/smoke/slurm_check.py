"""Whether a cluster can run the smoke test, found out before anything runs on it.

partition, nodes, limits        asked of the controller
clocks, the shared directory    asked of as many nodes as the largest launch has, by one `srun`
operator, urgent partition      only where a kind of stop needs them
"""

from __future__ import annotations

from collections.abc import Sequence

from megaresume.smoke.slurm_commands import Partition, ask, find_partitions, nodes_of, option, try_to, usable
from megaresume.stream.errors import SetupError, UsageError

__all__ = ["choose_partition", "choose_urgent", "enough_nodes", "may_set_nodes_down", "refuse_array"]


def choose_partition(name: str | None) -> Partition:
    """The partition of that name, or the default one.

    Raises:
        UsageError: there is none, or it is closed.
        SetupError: see `ask`.
    """
    partitions = find_partitions()
    chosen = next((p for p in partitions if (p.default if name is None else p.name == name)), None)
    names = ", ".join(p.name + (" (default)" if p.default else "") for p in partitions)
    if chosen is None:
        raise UsageError(
            "no partition was named, and there is no default one" if name is None else f"there is no partition {name}",
            found="no --partition" if name is None else f"--partition {name}",
            expected=f"one of {names}",
            action=f"--partition {partitions[0].name}" if partitions else "sinfo",
        )
    if not chosen.up:
        raise UsageError(
            f"partition {chosen.name} starts no jobs", found="it is not up", expected=f"one that is, of {names}"
        )
    return chosen


def refuse_array(options: Sequence[str]) -> None:
    """Refuse a job array: its jobs would all write to one directory.

    Raises:
        UsageError: it is one.
    """
    array = option(options, "array", "a")
    if array is not None:
        raise UsageError(
            "a job array cannot be tested",
            found=f"--array={array}",
            expected="one job: all jobs of an array would write to the same run directory",
            action="leave out --array in --sbatch-options and in the #SBATCH lines of the script",
        )


def enough_nodes(partition: Partition, most: int) -> dict[str, str]:
    """The nodes of the partition, by name, with their states.

    Raises:
        UsageError: fewer can be used than a launch has.
    """
    nodes = nodes_of(partition.name)
    working = [node for node, state in nodes.items() if usable(state)]
    out = ", ".join(f"{node} {state}" for node, state in nodes.items() if not usable(state))
    if most > len(working):
        raise UsageError(
            f"partition {partition.name} has too few nodes",
            found=f"--nodes {most}; {len(working)} of {len(nodes)} nodes can be used"
            + (f" (not: {out})" if out else ""),
            expected=f"at most {len(working)}",
            action=f"--nodes {len(working)}, another --partition, or `scontrol update nodename=... state=resume`",
        )
    if partition.max_nodes is not None and most > partition.max_nodes:
        raise UsageError(
            f"a job of partition {partition.name} may not have so many nodes",
            found=f"--nodes {most}, MaxNodes={partition.max_nodes}",
            expected=f"at most {partition.max_nodes}",
            action=f"--nodes {partition.max_nodes}, or another --partition",
        )
    return nodes


def choose_urgent(partition: Partition, name: str | None) -> Partition:
    """A partition whose jobs preempt those of ``partition``.

    Raises:
        UsageError: the one that was named does not exist, or does not preempt.
        SetupError: there is none.
    """
    partitions = find_partitions()
    able = [p for p in partitions if p.up and p.priority > partition.priority and partition.preemptable]
    chosen = next((p for p in able if name is None or p.name == name), None)
    if chosen is not None:
        return chosen
    found = ", ".join(f"{p.name} (priority {p.priority})" for p in partitions)
    if name is not None:
        raise UsageError(
            f"jobs of partition {name} do not preempt those of {partition.name}",
            found=f"--urgent-partition {name}; partitions: {found}",
            expected=", ".join(p.name for p in able) or f"a partition of a higher priority than {partition.priority}",
            action=f"--urgent-partition {able[0].name}" if able else "leave preempt out of --kill",
        )
    raise SetupError(
        f"no partition preempts {partition.name}",
        found=f"partitions: {found}"
        + ("" if partition.preemptable else f"; jobs of {partition.name} cannot be preempted by a partition"),
        expected=f"one whose PriorityTier is above {partition.priority}, and PreemptType=preempt/partition_prio",
        action="leave preempt out of --kill: requeue and sigterm do to the job what a preemption does",
    )


def may_set_nodes_down(node: str) -> None:
    """Whether this user may set nodes down, found out by a change that changes nothing.

    Raises:
        SetupError: no.
    """
    words = ask("scontrol", "show", "node", "--oneliner", node).split()
    weight = next((word.removeprefix("Weight=") for word in words if word.startswith("Weight=")), "1")
    done = try_to("scontrol", "update", f"nodename={node}", f"weight={weight}")
    if done.returncode:
        raise SetupError(
            "you may not set nodes down",
            found=f"scontrol update: {done.stderr.strip() or done.stdout.strip()}",
            expected="an operator or administrator of this Slurm",
            action="leave node-down out of --kill: sigkill loses a rank without warning as well; "
            "or try node-down on a cluster of your own: docs/local-slurm.md",
        )
