"""`Replay`: some steps of a run are repeated by its own program, without changing anything of the run.

    megaresume replay RUN --step N -- the user's launch command
        -> $MEGARESUME_REPLAY, the path of a file, which every process of that command inherits
        -> every `Session` in it: loads the checkpoint before step N from RUN, whatever the program names;
           locks the directory ``out`` instead of the run's, and records its start and its steps there;
           saves nothing; ends the program after step N

See `megaresume.runs.replay`, and docs/replay.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megaresume.batches.masked import REPLAY_VARIABLE
from megaresume.stream.errors import UsageError

#: the only sink, which `megaresume replay` compares; the program's own sinks are not used.
METRICS = "jsonl every=1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """The steps to repeat."""

    #: checkpoint root of the run, absolute; only read.
    run: str
    #: the checkpoint to load, a tag directory of the run; None: the program starts at step 0, as the run did.
    tag: str | None
    #: its optimizer steps; 0 without one.
    step: int
    #: the last step to train, counted from 1.
    last: int
    #: a directory outside the run, where the replay records what it did.
    out: str
    #: source -> documents left out of the loss; `megaresume.batches.masked` reads them.
    masked: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @classmethod
    def asked(cls) -> Replay | None:
        """The replay that this process is part of; None if it is not.

        Raises:
            UsageError: the variable names something else.
        """
        path = os.environ.get(REPLAY_VARIABLE)
        return cls.read(Path(path)) if path else None

    @classmethod
    def read(cls, path: Path) -> Replay:
        """Read a replay from a file with the result of `to_text`.

        Raises:
            UsageError: the file is something else.
        """
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(
                f"{path} cannot be read",
                found=f"{type(error).__name__}: {error}",
                expected="what megaresume replay has written, seen by every process",
                cause="the directory of the replay was removed, or is not seen by this node",
                action=f"--out DIR on storage that all nodes see; or unset {REPLAY_VARIABLE}, if this is no replay",
            ) from error

    def to_text(self) -> str:
        """The content of its file."""
        return json.dumps(asdict(self))

    @property
    def source(self) -> Path:
        """The checkpoint root to load from; an empty one to start at step 0."""
        return Path(self.out if self.tag is None else self.run)

    def line(self) -> str:
        """One line for the job's output."""
        begin = "from the beginning" if self.tag is None else f"from {self.tag}"
        return f"megaresume: replay of {self.run}, {begin} to step {self.last}; nothing is saved; records: {self.out}"
