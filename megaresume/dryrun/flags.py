"""What the new launch says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megaresume.stream.config import OnChange
from megaresume.stream.skips import NO_SKIP, SkipConfig

__all__ = ["Flags"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """Flags of a training program, by Megatron's names; None: as it was when the checkpoint was saved."""

    #: data config; None: the one that the run was last saved with.
    data: Path | None = None
    split: str | None = None
    seed: int | None = None
    seq_length: int | None = None
    on_change: OnChange = "refuse"
    #: what is to be left out, in addition to what the data config says.
    skip: SkipConfig = NO_SKIP
    #: load this iteration and no other.
    ckpt_step: int | None = None
    universal_checkpoint: bool = False
    #: the job converts a ZeRO checkpoint of another number of ranks.
    elastic: bool = False
    #: data-parallel size; None: what the nodes make of it, if they are given.
    dp: int | None = None
    nodes: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    #: start, increment, samples of the ramp-up.
    rampup_batch_size: tuple[int, int, int] | None = None
    num_workers: int | None = None
    zero_stage: int | None = None
    #: the length of the run, once: in steps or in samples. None: not said, and not recorded anywhere.
    train_iters: int | None = None
    train_samples: int | None = None
