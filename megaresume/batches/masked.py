"""Documents excluded from the loss, for ``replay --skip-documents``.

They stay in their places, and the order is unchanged; only their tokens' loss mask is 0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: the path of a `megaresume.checkpoint.replay.Replay`, as JSON. Unset if this is no replay.
REPLAY_VARIABLE = "MEGARESUME_REPLAY"


def masked_documents(names: Sequence[str]) -> dict[int, npt.NDArray[np.int64]]:
    """The documents, by the number of their source: int64[n], ascending.

    Args:
        names: of the sources, in the order of the stream's config.
    """
    import numpy as np  # deferred: code that only needs `REPLAY_VARIABLE` starts without it

    path = os.environ.get(REPLAY_VARIABLE)
    said = json.loads(Path(path).read_text())["masked"] if path else {}
    return {i: np.unique(np.array(said[name], np.int64)) for i, name in enumerate(names) if said.get(name)}
