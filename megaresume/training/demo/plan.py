"""What the demo runs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ATTEMPTS", "TWIN", "Attempt", "model_flags"]

SEQ_LENGTH = 256
GLOBAL_BATCH_SIZE = 16
SAVE_INTERVAL = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One start of the training program."""

    processes: int
    workers: int
    #: samples.
    micro_batch_size: int
    start_method: str | None = None
    #: fraction of the run's steps after which everything is killed, in the middle of the next step; None: it ends.
    killed_after: float | None = None

    @property
    def layout(self) -> str:
        """In words."""
        processes = f"{self.processes} process" + ("es" if self.processes > 1 else "")
        workers = f"{self.workers} worker" + ("s" if self.workers != 1 else "")
        how = f" ({self.start_method})" if self.start_method else ""
        return f"{processes}, micro-batch {self.micro_batch_size}, {workers}{how}"


#: The run that nobody disturbs.
TWIN = Attempt(processes=2, workers=0, micro_batch_size=4)

#: The run that is killed twice, and goes on differently each time.
ATTEMPTS = (
    Attempt(processes=2, workers=0, micro_batch_size=4, killed_after=0.29),
    Attempt(processes=1, workers=2, micro_batch_size=8, start_method="fork", killed_after=0.63),
    Attempt(processes=2, workers=1, micro_batch_size=2, start_method="spawn"),
)


def model_flags(steps: int) -> list[str]:
    """Flags of the training program that every start shares: Megatron's own."""
    flags = {
        "num-layers": 2,
        "hidden-size": 64,
        "num-attention-heads": 4,
        "seq-length": SEQ_LENGTH,
        "max-position-embeddings": SEQ_LENGTH,
        "global-batch-size": GLOBAL_BATCH_SIZE,
        "train-iters": steps,
        "lr": "3e-3",
        "min-lr": "3e-4",
        "lr-decay-style": "cosine",
        "lr-warmup-iters": max(steps // 20, 1),
        "save-interval": SAVE_INTERVAL,
        "eval-interval": steps,
        "eval-iters": 0,
        "seed": 1234,
    }
    return [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
