"""Undoing: byte for byte over formats, only ours where other lines were edited, refused where ours were."""

from __future__ import annotations

import codecs
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaresume.hosts.megatron.patching import PatchError
from megaresume.hosts.megatron.patching.patch import check, revert
from tests.hosts.megatron.patching.conftest import RECIPES, patch
from tests.hosts.megatron.patching.scripts import SHAPES, UP_TO_0_17, V0_19

SCRIPTS = [script for script, _ in SHAPES.values()]
FILLERS = ["", "   ", "# café ☕", "#\tüber", "X = 'ü'", "'''a\n\nb'''", "\f", "Y = (1,\n     2)", "if 1:\n\tpass"]


@st.composite
def variants(draw):
    """A script in one of the shapes, with other line ends, encodings, blank lines, comments and tabs."""
    text = draw(st.sampled_from(SCRIPTS))
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    head, main = text.split("\n\ndef model_provider", 1)
    filler = "\n".join(rng.choice(FILLERS) for _ in range(rng.randrange(4)))
    text = f"{head}\n{filler}\n\ndef model_provider{main}"
    if draw(st.booleans()):
        text = re.sub(r"^( {4})+", lambda m: "\t" * (len(m[0]) // 4), text, flags=re.MULTILINE)
    if draw(st.booleans()):
        text = text.replace(", ", " ,\t").replace("pretrain(", "pretrain (  ")
    if draw(st.booleans()):
        text = text.rstrip("\n")
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    encoding = draw(st.sampled_from(["utf-8", "bom", "latin-1"]))
    text = text.replace("\n", newline)
    if encoding == "bom":
        return codecs.BOM_UTF8 + text.encode()
    if encoding == "latin-1":
        return f"# -*- coding: latin-1 -*-{newline}{text}".replace("☕", "e").encode("latin-1")
    return text.encode()


@settings(max_examples=40, deadline=None)
@given(variants())
def test_any_format_comes_back_byte_for_byte(data):
    done = patch(data)
    assert done.data != data and revert(done.data, "s.py").data == data
    assert check(done.data, "s.py", RECIPES, None).ok
    # Nothing but insertions: what is left after taking our lines' additions out is a subsequence.
    rest = iter(done.data)
    assert all(byte in rest for byte in data)
    if b"\r\n" in data:
        assert done.data.count(b"\n") == done.data.count(b"\r\n")


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(SCRIPTS), st.integers(0, 1 << 30))
def test_edits_elsewhere_stay_when_the_patch_is_taken_out(script, seed):
    rng = random.Random(seed)
    lines = patch(script).data.decode().splitlines(keepends=True)
    plain = script.splitlines(keepends=True)
    # Insert, before lines that the patch did not touch, and into the original at the same places.
    untouched = [i for i, line in enumerate(lines) if lines.count(line) == 1 and plain.count(line) == 1]
    edited, expected = list(lines), list(plain)
    for number, index in enumerate(rng.sample(untouched, 3)):
        line = lines[index]
        if line.strip().startswith(("#", "def ", "import os", "from __future__")):
            text = f"{line[: len(line) - len(line.lstrip())]}# edited {number}\n"
            edited.insert(edited.index(line), text)
            expected.insert(expected.index(line), text)
    back = revert("".join(edited).encode(), "s.py")
    assert back.data.decode() == "".join(expected)
    assert back.exact == (expected == plain)


def test_a_syntax_error_elsewhere_does_not_stop_undoing():
    done = patch(V0_19).data.replace(b"def add_args(parser):", b"def add_args(parser:")
    assert revert(done, "s.py").data == V0_19.replace("def add_args(parser):", "def add_args(parser:").encode()


def test_line_ends_may_be_converted_after_the_patch():
    done = patch(V0_19).data.replace(b"\n", b"\r\n")
    assert revert(done, "s.py").data == V0_19.replace("\n", "\r\n").encode()


def edit(data: bytes, old: bytes, new: bytes) -> bytes:
    """Change the script, not the comment."""
    lines = data.splitlines(keepends=True)
    assert any(old in line for line in lines)
    return b"".join(line if line.startswith(b"# megaresume") else line.replace(old, new) for line in lines)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        (
            b".provider(datasets_provider),",
            b".provider(datasets_provider, 1),",
            "provider(datasets_provider, 1)",
        ),
        (b"megaresume.provider(datasets_provider),", b"datasets_provider,", "no line with megaresume.provider"),
        (b"import megaresume\n", b"import megaresume, sys\n", "import megaresume, sys"),
        (b"import megaresume\n", b"", "no line with import megaresume"),
    ],
)
def test_our_lines_edited_are_refused_by_line(old, new, found):
    edited = edit(patch(V0_19).data, old, new)
    with pytest.raises(PatchError, match="lines of the patch were edited") as caught:
        revert(edited, "s.py")
    assert found in str(caught.value.found)
    state = check(edited, "s.py", RECIPES, None)
    assert state.status == "edited" and found in str(state.reason)


def test_a_copied_line_is_told_apart_by_its_place_or_refused():
    done = patch(UP_TO_0_17).data
    copy = b"X = [\n        megaresume.provider(datasets_provider),  # ours\n]\n"
    after = done + copy
    assert revert(after, "s.py").data == UP_TO_0_17.encode() + copy
    before = done.replace(b"\n\ndef model_provider", b"\n" + copy + b"\ndef model_provider")
    with pytest.raises(PatchError) as caught:
        revert(before, "s.py")
    assert "several times" in str(caught.value.found)


@pytest.mark.parametrize("how", ["megatron-lm", "original", "check", '["', "split", "cut"])
def test_an_edited_marker_is_refused(how):
    lines = patch(V0_19).data.splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line.startswith(b"# megaresume-patch"))
    if how == "split":
        lines.insert(first + 2, b"# other\n")
    elif how == "cut":
        del lines[first + 1]
    else:
        index = next(
            i for i, line in enumerate(lines) if line.startswith(b"# megaresume-patch") and how.encode() in line
        )
        lines[index] = lines[index].replace(how.encode(), how.encode() + b"0")
    data = b"".join(lines)
    with pytest.raises(PatchError, match="marker of the patch was edited"):
        revert(data, "s.py")
    assert check(data, "s.py", RECIPES, None).status == "edited"
    with pytest.raises(PatchError):
        patch(data)


def test_a_marker_of_a_newer_format_is_refused():
    data = patch(V0_19).data.replace(b'{"format": 1, ', b'{"format": 2, ')
    with pytest.raises(PatchError, match="newer megaresume"):
        revert(data, "s.py")


def test_a_marker_of_another_file_is_refused():
    one = patch(V0_19).data
    other = one.replace(b"return parser", b"return parse_")  # the hash of the rest must not agree by chance
    assert not revert(other, "s.py").exact


def test_not_patched():
    with pytest.raises(PatchError, match="is not patched"):
        revert(V0_19.encode(), "s.py")
    assert check(V0_19.encode(), "s.py", RECIPES, None).status == "unpatched"


GOLDEN_ORIGINAL = """\
from megatron.training import get_args, pretrain
from m import data_provider, M, step, ModelType

pretrain(data_provider, M, ModelType.a, step)
"""
# ruff: noqa: E501
GOLDEN = """\
# megaresume-patch {"format": 1, "recipe": "megatron-lm-0.17", "version": 1, "undo": "megaresume patch --revert SCRIPT"}
# megaresume-patch [0, [], ["import megaresume"]]
# megaresume-patch [4, ["pretrain(data_provider, M, ModelType.a, step)"], ["pretrain(megaresume.provider(data_provider), M, ModelType.a, step, extra_args_provider=megaresume.extra_args_provider())"]]
# megaresume-patch {"original": "fcc5d9c1c18483c1e0569baa2a101981c138e7662cb55ddfc5cccff251f39afb", "check": "5b01dc0cdf48edf9"}
import megaresume
from megatron.training import get_args, pretrain
from m import data_provider, M, step, ModelType

pretrain(megaresume.provider(data_provider), M, ModelType.a, step, extra_args_provider=megaresume.extra_args_provider())
"""


def test_a_marker_of_format_1_stays_readable():
    """As the first version wrote it."""
    back = revert(GOLDEN.encode(), "s.py")
    assert (back.marker.recipe, back.marker.version, back.exact) == ("megatron-lm-0.17", 1, True)
    assert back.data.decode() == GOLDEN_ORIGINAL
    assert patch(GOLDEN_ORIGINAL).data.decode() == GOLDEN


def test_a_name_that_is_replaced_everywhere_also_in_the_marker_is_refused():
    data = patch(V0_19).data.replace(b"datasets_provider", b"data_provider")
    with pytest.raises(PatchError, match="marker of the patch was edited"):
        revert(data, "s.py")
