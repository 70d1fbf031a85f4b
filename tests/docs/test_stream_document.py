"""docs/stream.md: its data config and its code, as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megaresume.data.prepare.corpus import PrepareOptions, prepare
from megaresume.stream.config import StreamConfig
from tests.cli.conftest import megaresume
from tests.docs.pages import DOCS

#: up to the validation sets, which test_verify_documents.py tries
TEXT = (DOCS / "stream.md").read_text().partition("\n## Validation")[0]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """What the document speaks of: data.yaml beside three corpora."""
    root = tmp_path_factory.mktemp("document")
    (root / "corpora").mkdir()
    for name in ("web", "code", "wiki"):
        text = root / f"{name}.txt"
        # a hundred documents of a few thousand bytes; wiki is split, and its train part must not be empty
        text.write_text("\n\n".join(f"{name} {i} " + "word " * (200 + 31 * i % 900) for i in range(100)))
        prepare([text], root / "corpora" / f"{name}_text_document", PrepareOptions(text_unit="paragraph", workers=1))
    config, _ = blocks("yaml")
    (root / "data.yaml").write_text(config)
    return root


def test_text_that_fills():
    _, config = blocks("yaml")
    assert StreamConfig.from_dict({"seq_length": 64} | yaml.safe_load(config)).packed_by == "best_fit filled with text"


def test_the_commands(directory):
    for command in re.findall(r"^    megaresume (.*)$", TEXT, flags=re.MULTILINE):
        words = command.replace("data.yaml", str(directory / "data.yaml")).split()
        done = megaresume(*words)
        assert done.returncode == 0, done.stderr
        assert "wiki" in done.stdout


@pytest.mark.process
def test_the_code(directory):
    (code,) = blocks("python")
    code += (
        "\nassert stream.start == 256 and next(iter(loader))['samples'].tolist() == [256, 257]\n"
        "assert batch['samples'].tolist() == [0, 1, 2, 3]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
