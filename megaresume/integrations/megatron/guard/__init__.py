"""Record and pin the order of Megatron's own datasets.

Megatron derives the order of its samples anew at every start, from flags and files. This package records what came
out, in the checkpoint, and sees to it that a resume gets the same again, or is told what changed.

    first start   build as Megatron does  →  hash the built indexes  →  the record, in every checkpoint
    resume        compare flags and corpora with the record (refuse by name)  →  build with the recorded sizes,
                  weights and documents  →  compare the hashes  →  append whole epochs where more is needed now

    record.py     what is recorded: plain JSON, a few hundred bytes per corpus
    arrays.py     hashes of index arrays
    corpus.py     what identifies the documents of a corpus
    observe.py    built datasets → record
    request.py    what a builder is asked to build
    compare.py    record against request: what changed, in words, and the flag that restores it
    needed.py     samples until the end of the run, where Megatron asks for too few
    pinned.py     let Megatron's builder build what is recorded
    verify.py     built datasets against the record
    empty.py      splits without a token, refused
    extend.py     further samples behind the recorded ones
    build.py      around ``BlendedMegatronDatasetBuilder``
    agree.py      who looks at the indexes, and how the others hear of it
    foreign.py    datasets built without that builder (Megatron-DeepSpeed): compared, not pinned
    order.py      `guarded` and `GuardOrder`
    show.py       the record for people: ``megaresume inspect``
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaresume.integrations.megatron.guard.build import around_builder_build
    from megaresume.integrations.megatron.guard.order import GuardOrder, guarded, shared
    from megaresume.integrations.megatron.guard.show import describe

__all__ = [
    "GuardOrder",
    "around_builder_build",
    "describe",
    "guarded",
    "shared",
]

_HOME = {
    "GuardOrder": "order",
    "around_builder_build": "build",
    "describe": "show",
    "guarded": "order",
    "shared": "order",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
