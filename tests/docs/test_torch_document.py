"""docs/torch.md: its loader of a stream. Its program is tried by `test_starting_points.py`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

DOCUMENT = Path(__file__).parents[2] / "docs" / "torch.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def test_the_stream_of_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.hosts.conftest import write_corpus

    write_corpus(tmp_path / "web", documents=50, seed=1)
    (tmp_path / "data.yaml").write_text("seed: 7\nseq_length: 32\nsources:\n  web: {path: web}\n")
    monkeypatch.chdir(tmp_path)
    import megaresume

    names = {"megaresume": megaresume}
    exec(next(block for block in blocks() if "open_stream" in block), names)
    batch = next(iter(names["loader"]))  # type: ignore[call-overload]
    assert batch["samples"].tolist() == [0, 1]
