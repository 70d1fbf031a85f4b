"""``kind: items``: a data config that knows the items of a dataset by their numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaresume.batches.open import open_stream
from megaresume.stream.errors import ConfigError, CorpusError

CONFIG = {"seed": 0, "seq_length": 1, "packing": "none", "blend": {"unit": "documents"}}


def test_it_plans_what_a_loader_of_the_dataset_does() -> None:
    import megaresume

    loader = megaresume.DataLoader({"a": (range(30), 2), "b": (range(20), 1)}, 5)
    stream = open_stream(loader.origin)
    assert stream.fingerprints == loader.stream.fingerprints
    assert stream.state_at(40).digest == loader.stream.state_at(40).digest
    with pytest.raises(CorpusError, match="what item 3 of source 'a' holds is not known here"):
        stream.sources[0].get(3)  # type: ignore[attr-defined]


def test_it_plans_what_a_loader_packs(tmp_path: Path) -> None:
    import megaresume

    texts = [{"input_ids": [i] * (1 + i * 17 % 40)} for i in range(60)]
    options: dict[str, Any] = {"seq_length": 64, "keyed": True}
    assert megaresume.DataLoader(texts, 2, **options).origin is None
    lengths = [len(text["input_ids"]) for text in texts]
    for given in (None, lengths):
        loader = megaresume.DataLoader(texts, 2, lengths_dir=tmp_path, lengths=given, **options)
        stream = open_stream(loader.origin)
        assert stream.fingerprints == loader.stream.fingerprints
        assert stream.state_at(12).digest == loader.stream.state_at(12).digest
        assert stream.sources[0].fingerprint(first=50).tokens == sum(lengths[:50])  # type: ignore[union-attr]
    assert loader.origin is not None
    path = Path(loader.origin["sources"]["data"]["lengths"])
    for found, spoil in (("EOFError", lambda: path.write_bytes(b"")), ("FileNotFoundError", path.unlink)):
        spoil()
        with pytest.raises(CorpusError, match=rf"lengths of the items of source 'data' cannot be read(.|\n)*{found}"):
            open_stream(loader.origin)
    np.save(path, np.ones(59, np.int64))
    with pytest.raises(CorpusError, match=r"int64\[59\]"):
        open_stream(loader.origin)
    megaresume.DataLoader(texts, 2, lengths_dir=tmp_path, lengths=lengths, **options)  # writes it again
    assert open_stream(loader.origin).fingerprints == loader.stream.fingerprints


@pytest.mark.parametrize(
    "options",
    [{}, {"items": 0}, {"items": True}, {"items": "9"}, {"items": 9, "contents": 7}, {"items": 9, "lengths": 7}],
)
def test_a_config_that_does_not_say_how_many(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="of kind items does not say how many"):
        open_stream(CONFIG | {"sources": {"a": {"kind": "items"} | options}})
