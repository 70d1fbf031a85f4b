"""What a resume found and did, and the line that says so: the same under DeepSpeed and Megatron."""

from __future__ import annotations

from dataclasses import dataclass

from megaresume.checkpoint.topology import Topology
from megaresume.stream.outlook import outlook_lines
from megaresume.stream.stream import Stream

__all__ = ["Resume", "change_lines"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """What a resume found and did."""

    #: optimizer steps done, and samples that they trained.
    step: int
    samples: int
    #: of those samples, 16 hex digits.
    digest: str
    tag: str
    #: how the run was laid out when it saved, and is now.
    before: Topology | None
    now: Topology
    #: samples that the weights have seen and that would come again; that they have not seen and would not come.
    #: Counted against the framework's own count of trained samples, which rides in the same file as the weights.
    repeated: int
    skipped: int
    #: what became of the random state, in words; None: it is the framework's business.
    random: str | None = None
    #: why another order begins here, as it was accepted: NAME@SAMPLES. What it repeats and skips nobody has counted.
    order_changed: tuple[str, ...] = ()

    def line(self) -> str:
        """One line, to be searched for in logs."""
        before = self.before or self.now
        pairs = [("dp", "dp"), ("workers", "num_workers"), ("mbs", "micro_batch_size"), ("gbs", "global_batch_size")]
        layout = " ".join(f"{word} {getattr(before, name)}->{getattr(self.now, name)}" for word, name in pairs)
        counts = f"repeated {self.repeated} skipped {self.skipped}"
        if self.order_changed:
            counts = f"repeated unknown skipped unknown (order changed: {', '.join(self.order_changed)})"
        return (
            f"megaresume: resumed at sample {self.samples} | digest {self.digest} | {layout} | "
            f"{counts} | step {self.step} from {self.tag}" + (f" | {self.random}" if self.random else "")
        )


def change_lines(stream: Stream, global_batch_size: int) -> list[str]:
    """What was accepted at the resume, and what is ahead of every source; nothing where nothing changed."""
    if not stream.accepted:
        return []
    state = stream.state_at(stream.start)
    table = outlook_lines(state, stream.config_at(stream.start), global_batch_size)
    return [f"megaresume: {line}" for line in (*stream.accepted, *table)]
