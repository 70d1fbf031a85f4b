"""A checkpoint under guard that was loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaresume.checkpoint.host import Loaded
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.records.envelope import Envelope, OpaqueState


def order_state(content: Mapping[str, Any], samples: int) -> OpaqueState:
    """What `OrderRecord.to_dict` gave, as a state."""
    return OpaqueState(kind="order", samples=samples, digest="0" * 16, content=content)


def order_loaded(content: Mapping[str, Any], samples: int) -> Loaded:
    """What a session holds after the load."""
    envelope = Envelope(state=order_state(content, samples), iteration=1, framework="megatron-lm 0")
    choice = Choice(load_dir=Path(), tag="", iteration=1, record=None, manifest=None)
    return Loaded(choice=choice, envelope=Envelope.read(envelope.to_text()), topology=None)
