"""docs/tried.md is made by a run on real upstream code, too long for any tier: it must not be stale."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.release import release
from tests.upstream import document, trainers
from tests.upstream.__main__ import Record
from tests.upstream.compare import difference, read_steps
from tests.upstream.document import fingerprints_of
from tests.upstream.fingerprint import ROOT, files, fingerprint
from tests.upstream.page import PAGE, read_part, write_part
from tests.upstream.results import Result
from tests.upstream.trees import UPSTREAMS


@release(
    "docs/tried.md is made before a release, not at every change",
    "`tests/hosts/megatron`, on a stand-in that keeps upstream's protocol",
)
def test_the_document_is_as_new_as_the_integration():
    found = fingerprints_of(PAGE.read_text())
    assert found == {fingerprint()}, (
        f"docs/tried.md was made with integration {', '.join(found)}, and this is {fingerprint()}: "
        "make upstream CLONES=/path/to/clones"
    )


def test_the_fingerprint_covers_what_decides(tmp_path):
    assert {"run.py", "patch.py", "seams.py", "record.py", "mindspeed-llm.yaml"} < {path.name for path in files()}
    for path in files():
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    assert fingerprint(tmp_path) == fingerprint()
    for path in (
        tmp_path / "megaresume" / "run.py",
        tmp_path / "megaresume" / "hosts/megatron/patching" / "__init__.py",
    ):
        text = path.read_text()
        head, _, rest = text.partition('"""')[2].partition('"""')
        path.write_text(f'# why\n"""Other words than {head[:9]}."""\n{rest.rstrip()}  # at the end\n')
        assert fingerprint(tmp_path) == fingerprint(), "comments and docstrings decide nothing"
        path.write_text(f'{text}"""A string.""".strip()\n')
        assert fingerprint(tmp_path) != fingerprint()
        path.write_text(text)
        moved = path.rename(path.with_name("elsewhere.py")) if path.name == "__init__.py" else path
        assert fingerprint(tmp_path) == fingerprint(), "the file in which a definition stands decides nothing"
        moved.rename(path)
    (tmp_path / "patches" / "mindspeed-llm.yaml").write_text("changed")
    assert fingerprint(tmp_path) != fingerprint()


@release(
    "the same document",
    "`tests/hosts/megatron`, on a stand-in that keeps upstream's protocol",
)
def test_every_upstream_that_was_asked_for_has_a_row():
    text = PAGE.read_text()
    assert [one.title for one in UPSTREAMS if f"| {one.title} |" not in text] == []


def test_each_program_writes_its_part_of_the_page(tmp_path):
    sections = dict(trainers._sections(PAGE))
    assert list(sections) == [host.title for host in trainers.HOSTS.values()]
    assert read_part(PAGE, "trainers") == "\n".join([trainers.HEAD, *sections.values()])
    assert read_part(PAGE, "megatron").startswith(document._HEAD)
    page = tmp_path / "tried.md"
    page.write_bytes(PAGE.read_bytes())
    write_part(page, "megatron", "new\n")
    assert read_part(page, "megatron") == "new\n" and read_part(page, "trainers") == read_part(PAGE, "trainers")
    write_part(page, "megatron", read_part(PAGE, "megatron"))
    assert page.read_text() == PAGE.read_text()
    page.write_text("no marks")
    with pytest.raises(ValueError, match="has no marks"):
        write_part(page, "megatron", "new")


def test_an_interrupted_run_goes_on(tmp_path):
    """What failed, what another integration was tried with, and what was interrupted is tried again."""
    record = Record(tmp_path / "results.json")
    for name, made_with, status in (
        ("0.8.0", f"{fingerprint()} abc", "ok"),
        ("main", f"{fingerprint()} abc", "failed"),
        ("dev", "0000000000000000 abc", "ok"),
        ("rocm", "", "ok"),
    ):
        record.results[name] = {"runs": [Result(upstream=name, what="x", status=status)]}
        record.made_with |= {f"{name} runs": made_with} if made_with else {}
    record.save()
    again = Record(tmp_path / "results.json")
    assert [name for name in ("0.8.0", "main", "dev", "rocm", "0.9.0") if again.is_current(name, "runs")] == ["0.8.0"]


def test_missing_clones_are_named_with_what_fetches_them(tmp_path):
    (tmp_path / "NVIDIA").mkdir()
    subprocess.run(["git", "init", "-q", str(tmp_path / "NVIDIA" / "Megatron-LM")], check=True)
    command = [sys.executable, "-m", "tests.upstream.trees", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"git -C {tmp_path}/NVIDIA/Megatron-LM fetch --tags origin core_v0.8.0" in done.stderr
    assert f"git clone https://github.com/swiss-ai/Megatron-LM {tmp_path}/swiss-ai/Megatron-LM" in done.stderr


def log(folder: Path, rank: int, dp: int, entries: list[tuple[int, list[str]]], loader: int = 0) -> None:
    with open(folder / f"batches-{rank}.jsonl", "a") as file:
        for consumed, rows in entries:
            file.write(json.dumps({"consumed": consumed, "dp": dp, "loader": loader, "rows": rows}) + "\n")


def test_global_batches_are_put_together_in_the_order_of_the_samples(tmp_path):
    """Two data-parallel ranks of two pipeline stages each; the last stage reads by its second loader."""
    for rank, dp, loader in ((0, 0, 0), (2, 0, 1), (1, 1, 0), (3, 1, 1)):
        mine = ["ab", "ef"] if dp == 0 else ["cd", "gh"]
        log(tmp_path, rank, dp, [(0, list(mine[0])), (0, list(mine[1])), (99, ["x"])], loader)
    steps = read_steps(tmp_path, end=8)
    assert steps == {0: list("abcdefgh")} and difference(steps, steps, 0, 8) is None
    assert "sample 5" in str(difference({0: list("abcdeXgh")}, steps, 0, 8))
    assert "7 samples at 0, not 8" in str(difference({0: list("abcdefg")}, steps, 0, 8))
    assert "trained the steps at []" in str(difference({}, steps, 0, 8))
    log(tmp_path, 4, 0, [(0, ["z", "z"])])
    with pytest.raises(ValueError, match="one model read different data"):
        read_steps(tmp_path, end=8)
