"""README.md and docs/index.md: short, without dead links, and every page two clicks away."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megaresume.program import COMMANDS

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"


def links(document: Path, text: str | None = None) -> set[Path]:
    """Files that a document links to."""
    text = document.read_text() if text is None else text
    return {document.parent / link for link in re.findall(r"\]\((?!\w+:)([^)#]+)(?:#[^)]*)?\)", text)}


def anchors(document: Path) -> set[str]:
    """Of its headings, as they are made on a page."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 130
    assert all(path.exists() for path in links(README)), [path for path in links(README) if not path.exists()]
    for name, anchor in re.findall(r"\]\((docs/[\w-]+\.md)#([\w-]+)\)", text):
        assert anchor in anchors(ROOT / name), (name, anchor)


def test_every_page_is_two_clicks_away() -> None:
    index = DOCS / "index.md"
    first = links(index, index.read_text().partition("```{toctree}")[0])
    second = {page for one in first if one.suffix == ".md" for page in links(one)}
    pages = {page.resolve() for page in DOCS.glob("*.md")} - {index}
    assert pages <= {page.resolve() for page in first | second}
    assert {page.resolve() for page in links(README) if page.suffix == ".md"} <= pages | {
        index,
        ROOT / "CONTRIBUTING.md",
    }


def test_every_command_is_in_its_table() -> None:
    named = re.findall(r"^\| `megaresume ([a-z-]+)", (DOCS / "commands.md").read_text(), re.MULTILINE)
    assert set(COMMANDS) <= {*named, "completion"}


class Killed(Exception):
    pass


def taught(monkeypatch: pytest.MonkeyPatch, directory: Path, stop: int | None = None) -> list[list[float]]:
    """Run README.md's first program. Returns the targets of each step; it dies in step ``stop``."""
    torch = pytest.importorskip("torch")
    import megaresume

    monkeypatch.chdir(directory)
    torch.manual_seed(1)
    x = torch.randn(800, 4, generator=torch.Generator().manual_seed(2))
    model = torch.nn.Linear(4, 1)
    targets_of: list[list[float]] = []

    def loss_of(predicted: Any, targets: Any) -> Any:
        if len(targets_of) == stop:
            raise Killed
        targets_of.append(targets.flatten().tolist())
        return torch.nn.functional.mse_loss(predicted, targets)

    dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    program, *_ = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names = {"megaresume": megaresume, "dataset": dataset, "model": model, "loss_of": loss_of}
    exec(program, names | {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)})
    return targets_of


@pytest.mark.process
def test_its_first_program_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = taught(monkeypatch, tmp_path / "whole")
    assert len(whole) == 300  # three epochs of 100 steps
    with pytest.raises(Killed):
        taught(monkeypatch, tmp_path / "cut", stop=250)
    assert taught(monkeypatch, tmp_path / "cut") == whole[200:]
