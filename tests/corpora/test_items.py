"""``kind: items``: a data config that knows the items of a dataset by their numbers."""

from __future__ import annotations

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


@pytest.mark.parametrize("options", [{}, {"items": 0}, {"items": True}, {"items": "9"}, {"items": 9, "contents": 7}])
def test_a_config_that_does_not_say_how_many(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="of kind items does not say how many"):
        open_stream(CONFIG | {"sources": {"a": {"kind": "items"} | options}})
