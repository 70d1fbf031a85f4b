"""Errors say what was found, what was expected, why, and what to do, also when they come from another process."""

from __future__ import annotations

import pickle
import unicodedata

import pytest

from megaresume.stream import errors
from megaresume.stream.errors import ConfigError, MegaresumeError, StateError, UsageError, one_line, visible


@pytest.mark.parametrize("name", [name for name in vars(errors) if name.endswith(("Error", "Exhausted"))])
def test_through_a_worker_process(name: str) -> None:
    error = getattr(errors, name)("it broke", found=3, expected="4", cause="rain", action="wait")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and isinstance(again, MegaresumeError)
    assert str(again) == str(error)
    assert str(error).splitlines() == [
        "it broke",
        "  found:        3",
        "  expected:     4",
        "  likely cause: rain",
        "  next action:  wait",
    ]


def test_what_is_not_known_is_left_out() -> None:
    assert str(StateError("it broke", found=0)) == "it broke\n  found:        0"


def test_an_unknown_word_names_the_nearest() -> None:
    assert str(UsageError.unknown("writer", "dpc", ("torch", "dcp"), action="correct it")).splitlines() == [
        "unknown writer",
        "  found:        'dpc'",
        "  expected:     one of torch, dcp",
        "  likely cause: did you mean 'dcp'?",
        "  next action:  correct it",
    ]
    far = ConfigError.unknown("source", "books", ("web",), found="--find books:1")
    assert type(far) is ConfigError and (far.found, far.cause) == ("--find books:1", None)


@pytest.mark.parametrize(
    ("why", "found"),
    [
        (FileNotFoundError(2, "No such file or directory", "a.json"), "No such file or directory"),
        (OSError("it broke"), "it broke"),
        (ValueError("not JSON"), "not JSON"),
        (KeyError("a"), "KeyError: 'a'"),
    ],
)
def test_what_cannot_be_read_tells_why_without_its_path_twice(why: Exception, found: str) -> None:
    assert str(UsageError.unreadable("a.json", why, "a JSON object")).splitlines() == [
        "a.json cannot be read",
        f"  found:        {found}",
        "  expected:     a JSON object",
    ]
    assert StateError.unreadable("the ledger", why, "a readable file", at="a.json").found == f"a.json: {found}"


def test_every_control_character_is_spelled_out() -> None:
    shown = visible("".join(map(chr, range(0x110000))))
    left = {c for c in shown if unicodedata.category(c) in ("Cc", "Zl", "Zp")}
    assert left == {"\n", "\t"}
    assert not {c for c in shown if unicodedata.bidirectional(c) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "PDI")}
    assert visible("a\x1b[31m\x9b\x7f\u202e") == r"a\x1b[31m\x9b\x7f\u202e"


def test_other_text_stays_as_it_is() -> None:
    text = "日本 café\n\t👩‍👩‍👧 نمی‌خواهم \udcff"
    assert visible(text) == text
    assert visible("\ud800\udc7f\udfff") == r"\ud800\udc7f\udfff"
    assert one_line("a\nb") == r"a\nb"
