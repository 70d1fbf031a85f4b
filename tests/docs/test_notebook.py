"""docs/notebook.ipynb: every cell runs in a real kernel of Jupyter, and shows what it should."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.docs.pages import DOCS
from tests.packaging.conftest import ROOT

nbclient = pytest.importorskip("nbclient")
pytest.importorskip("torch")
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The outputs of its cells of code."""
    import nbformat

    directory = tmp_path_factory.mktemp("notebook")
    programs = directory / "bin"
    programs.mkdir()
    (programs / "megaresume").write_text(f'#!/bin/sh\nexec {sys.executable} -m megaresume "$@"\n')
    (programs / "megaresume").chmod(0o755)
    kernel = directory / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    words = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": words, "display_name": "Python 3", "language": "python"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(directory / "jupyter"))
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        notebook = nbformat.read(DOCS / "notebook.ipynb", as_version=4)
        resources = {"metadata": {"path": str(directory)}}
        nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def html_of(outputs: list[Any]) -> str:
    """The only one that a cell shows as HTML; well-formed."""
    (text,) = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    ElementTree.fromstring(text)
    return str(text)


def words(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub("<[^>]+>", " ", text))


def test_a_plan(shown: list[list[Any]]) -> None:
    text = html_of(shown[1])
    assert "Samples 0 to 399 : 400 samples" in words(text) and "sums" in text
    assert "currentColor" in text and "<svg" in text


def test_a_state(shown: list[list[Any]]) -> None:
    assert re.search(
        r"Stream after 400 samples : .* of all positions filled .* sums .* 100.0% \(100.0%\)", words(html_of(shown[2]))
    )


def test_loaders(shown: list[list[Any]]) -> None:
    assert "Stream after 320 samples" in words(html_of(shown[3]))
    assert "Stream after 352 samples" in words(html_of(shown[4]))


def test_a_bar(shown: list[list[Any]]) -> None:
    pytest.importorskip("ipywidgets")
    (bar,) = [
        output["data"] for output in shown[5] if "application/vnd.jupyter.widget-view+json" in output.get("data", {})
    ]
    assert "reading" in bar["text/plain"]


def test_it_is_stored_without_outputs() -> None:
    cells = json.loads((DOCS / "notebook.ipynb").read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []
