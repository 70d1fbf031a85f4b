"""A corpus of which one document cannot be read, by the one rank whose sample it is in."""

from __future__ import annotations

import numpy as np
import toy

import megaresume
from megaresume.stream.errors import CorpusError


class Corpus:
    def __len__(self) -> int:
        return 400

    def length(self, i: int) -> int:
        return 32

    def get(self, i: int) -> np.ndarray:
        if i == 37:
            raise CorpusError("document 37 is damaged", action="restore the corpus")
        return np.full(32, i % 64)


toy.start()
engine = toy.engine_of()
data = megaresume.attach(
    engine,
    {"seed": 1, "seq_length": 32, "packing": "none", "sources": {"web": {"kind": "python"}}},
    data_options=megaresume.DataOptions(objects={"web": Corpus()}),
    loader_options=megaresume.LoaderOptions(num_workers=int(toy.sys.argv[3])),
)
toy.train(engine, data, 60)
print("it was not noticed", flush=True)
