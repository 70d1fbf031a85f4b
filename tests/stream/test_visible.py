from __future__ import annotations

import unicodedata

from megaresume.stream.errors import one_line, visible


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
