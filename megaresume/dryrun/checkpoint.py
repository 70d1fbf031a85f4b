"""Which checkpoint the launch would load.

Under DeepSpeed we choose it (`checkpoint.choose`). Megatron-LM loads what its tracker names, and we check beforehand
that this is whole (`integrations.megatron.tracker`).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

from megaresume.checkpoint.choose import Choice
from megaresume.checkpoint.layout import TRACKER, deepspeed_tag, megatron_tag
from megaresume.dryrun.findings import Finding, attempt
from megaresume.dryrun.flags import Flags
from megaresume.integrations.loadable import BEGIN_ANEW, choose_to_load, without_state
from megaresume.integrations.megatron import launch
from megaresume.integrations.megatron.guard.record import OrderRecord
from megaresume.runs.run import Run
from megaresume.stream.errors import CheckpointError, MegaresumeError

__all__ = ["Found", "find"]

#: stream: our samples. guard: Megatron's own datasets, with their order recorded. adopt: the same, not recorded yet.
#: inside: the state is in the checkpoint alone. fresh: nothing to load. None: refused.
Kind = Literal["stream", "guard", "adopt", "inside", "fresh"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What the launch would go on from."""

    kind: Kind | None
    #: whether Megatron-LM wrote the directory.
    is_megatron: bool
    choice: Choice | None
    #: of a guarded run.
    record: OrderRecord | None
    #: optimizer steps done.
    iteration: int


def find(run: Run, flags: Flags, findings: list[Finding]) -> Found:
    """Decide as the launch would; what it would refuse is added to the findings."""
    is_megatron = any(c.iteration is not None and c.tag == megatron_tag(c.iteration) for c in run.candidates)
    before = len(findings)
    choice, kind, record = None, None, None
    if is_megatron:
        choice, kind, record = _megatron(run, flags, findings)
    else:
        choice = attempt(lambda: _deepspeed(run, flags), findings)
        if choice is not None and choice.state is None:
            findings.append(Finding.of(without_state(choice, BEGIN_ANEW)))
        elif len(findings) == before:
            kind = "fresh" if choice is None else "stream"
    return Found(
        kind=kind if not any(f.kind == "refused" for f in findings[before:]) else None,
        is_megatron=is_megatron,
        choice=choice,
        record=record,
        iteration=0 if choice is None or choice.iteration is None else choice.iteration,
    )


def _deepspeed(run: Run, flags: Flags) -> Choice | None:
    if not flags.universal_checkpoint:
        return run.choose(flags.ckpt_step)
    tag = None if flags.ckpt_step is None else f"{deepspeed_tag(flags.ckpt_step)}_universal"
    return choose_to_load(str(run.root), tag, universal=True)


def _megatron(run: Run, flags: Flags, findings: list[Finding]) -> tuple[Choice | None, Kind | None, OrderRecord | None]:
    from megaresume.integrations.megatron.guard import read_record
    from megaresume.integrations.megatron.tracker import check_content, check_tracker

    root, iteration = run.root, flags.ckpt_step
    instead: list[Choice] = []

    def check() -> bool:
        other = check_tracker(SimpleNamespace(load=str(root), save=str(root), ckpt_step=flags.ckpt_step))
        instead.extend([] if other is None else [other])
        if (root / TRACKER).is_file():
            check_content(root / TRACKER)
        return True

    if not attempt(check, findings):
        return None, None, None
    for other in instead:
        iteration = other.iteration
        findings += [Finding(kind="warning", headline=f"passed over {rejected}") for rejected in other.rejected]
    if iteration is None:
        iteration = run.pointers[1].iteration
    if iteration is None:
        return None, "fresh", None
    try:
        choice = run.choose(iteration)
    except CheckpointError as error:
        if not (root / megatron_tag(iteration)).is_dir():
            findings.append(Finding.of(error))
            return None, None, None
        # Whole for Megatron, whose tracker moved; the kill came before the records beside it.
        findings.append(
            Finding(
                kind="note",
                headline="the data state is inside the checkpoint only, so that nothing can be said about the data",
                found=f"{megatron_tag(iteration)}: {error.found}",
                cause="the save was killed between Megatron's tracker and the records beside the checkpoint",
                action="the next start writes the records; then plan again",
            )
        )
        return None, "inside", None
    except MegaresumeError as error:
        findings.append(Finding.of(error))
        return None, None, None
    if choice is None or choice.state is not None:
        return choice, "fresh" if choice is None else "stream", None
    payload = attempt(lambda: read_record(root) or {}, findings)
    record = attempt(lambda: OrderRecord.from_dict(payload), findings) if payload else None
    mode = "guard" if flags.data is None else "stream"
    if record is not None:
        attempt(lambda: launch.check_mode("guard", mode), findings)
    elif mode == "stream":
        findings.append(Finding.of(launch.without_state(iteration, 0)))
    return choice, "guard" if record is not None else "adopt", record
