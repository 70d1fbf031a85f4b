"""`prepare` of conversations: corpus, spans, summary; the same bytes whatever happened; bad rows and long ones."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaresume.data.documents import TextOptions
from megaresume.data.prepare.chat import ChatOptions
from megaresume.data.prepare.corpus import PrepareOptions, prepare
from megaresume.data.spans import spans_of
from megaresume.data.split import IndexedSource, open_corpus
from megaresume.encoding.text.tokenizers import load_tokenizer
from megaresume.encoding.text.turns import Selection
from megaresume.program import main
from megaresume.stream.errors import CorpusError, MegaresumeError, SetupError, UsageError
from tests.encoding.text.families import FAMILIES, GENERATION
from tests.encoding.text.kit import reference_tokenizer, write_tokenizer

CHAT = ChatOptions()


def row(i: int) -> dict[str, Any]:
    question, answer = f"How are you, {i}?", "the fox " * i + "."
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


ROWS = [row(i) for i in range(1, 40)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), FAMILIES["chatml"], template=GENERATION["chatml"])


def write(path: Path, rows: list[Any]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_text() != text:  # a file that is written again is another input
        path.write_text(text)
    return path


def documents(prefix: Path) -> list[tuple[list[int], list[int]]]:
    """Tokens and mask of each document."""
    source = IndexedSource(prefix)
    spans = spans_of(source, np.arange(len(source)))
    assert spans is not None
    return [
        (source.get(i).tolist(), spans.mask(i, 0, source.length(i)).astype(int).tolist()) for i in range(len(source))
    ]


def made(tmp_path: Path, tokenizer: Path, rows: list[Any], chat: ChatOptions = CHAT, **more: Any) -> Any:
    path = write(tmp_path / "in.jsonl", rows)
    options = PrepareOptions(tokenizer=tokenizer, chat=chat, **more)
    return prepare([path], tmp_path / "out", options)


def test_the_corpus_is_what_transformers_makes(tmp_path, tokenizer):
    summary = made(tmp_path, tokenizer, ROWS)
    theirs = reference_tokenizer(tokenizer)
    expected = [
        theirs.apply_chat_template(row["messages"], return_assistant_tokens_mask=True, return_dict=True) for row in ROWS
    ]
    assert documents(tmp_path / "out") == [(one["input_ids"], one["assistant_masks"]) for one in expected]
    assert summary.trained == sum(sum(one["assistant_masks"]) for one in expected)
    assert (summary.documents, summary.too_long, summary.shortened) == (39, 0, 0)
    assert IndexedSource(tmp_path / "out").tokenizer["fingerprint"] == load_tokenizer(tokenizer).fingerprint()


def test_eod_after_a_conversation_is_trained_as_the_token_before_it(tmp_path, tokenizer):
    made(tmp_path, tokenizer, ROWS[:1], append_eod=True)
    (tokens, mask), eod = documents(tmp_path / "out")[0], load_tokenizer(tokenizer).eod
    assert tokens[-1] == eod and mask[-2:] == [0, 0]


def test_blocks_and_a_killed_run_change_no_byte(tmp_path, tokenizer, monkeypatch):
    made(tmp_path, tokenizer, ROWS)
    files = {suffix: Path(f"{tmp_path / 'out'}.{suffix}").read_bytes() for suffix in ("bin", "idx", "spans")}
    from megaresume.data.prepare import encode

    class Stop(Exception):
        pass

    real, calls = encode.Encoder.encode, []

    def encode_some(self: Any, index: int, block: Any) -> Any:
        calls.append(index)
        if len(calls) == 4:
            raise Stop
        return real(self, index, block)

    monkeypatch.setattr(encode.Encoder, "encode", encode_some)
    with pytest.raises(Stop):
        made(tmp_path, tokenizer, ROWS, block_bytes=700, overwrite=True)
    summary = made(tmp_path, tokenizer, ROWS, block_bytes=700, overwrite=True)
    assert summary.resumed_blocks == 3 and summary.blocks > 5
    assert files == {suffix: Path(f"{tmp_path / 'out'}.{suffix}").read_bytes() for suffix in files}


def test_parts_of_several_machines_change_no_byte(tmp_path, tokenizer):
    made(tmp_path, tokenizer, ROWS)
    expected = {name: (tmp_path / name).read_bytes() for name in ("out.bin", "out.idx", "out.spans")}
    for part in ((3, 3), (1, 3), (2, 3), None):
        summary = made(tmp_path, tokenizer, ROWS, part=part, block_bytes=1000, overwrite=True)
        assert summary.trained > 0
    assert summary.resumed_blocks == summary.blocks > 5
    assert {name: (tmp_path / name).read_bytes() for name in expected} == expected


def test_a_corpus_of_texts_in_its_place_has_no_spans(tmp_path, tokenizer):
    made(tmp_path, tokenizer, ROWS)
    prepare([write(tmp_path / "t.jsonl", [{"text": "x"}])], tmp_path / "out", PrepareOptions(overwrite=True))
    assert not (tmp_path / "out.spans").exists()
    assert spans_of(IndexedSource(tmp_path / "out"), np.array([0])) is None


def test_parquet_is_what_json_lines_are(tmp_path, tokenizer):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    made(tmp_path, tokenizer, ROWS)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{**row, "raw": b"\xff"} for row in ROWS]), path, row_group_size=7)
    for size in (None, 600):
        options = PrepareOptions(tokenizer=tokenizer, chat=ChatOptions(), block_bytes=size, overwrite=True)
        prepare([path], tmp_path / "p", options)
        for suffix in ("bin", "idx", "spans"):
            assert Path(f"{tmp_path / 'p'}.{suffix}").read_bytes() == Path(f"{tmp_path / 'out'}.{suffix}").read_bytes()
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.raises(CorpusError, match=r"rows\.parquet is damaged"):
        prepare([path], tmp_path / "q", PrepareOptions(tokenizer=tokenizer, chat=ChatOptions()))
    pq.write_table(pa.table({"text": [["one"], [], ["two"]]}), path)
    with pytest.raises(CorpusError, match=r"rows\.parquet:1: 'text' is not a text"):
        prepare([path], tmp_path / "t", PrepareOptions())


def test_a_damaged_row_group_is_named_or_left_out_and_counted(tmp_path, tokenizer):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=7, write_page_checksum=True)
    at = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset + 30
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    options = PrepareOptions(tokenizer=tokenizer, chat=ChatOptions(), overwrite=True)
    with pytest.raises(CorpusError, match=r"rows\.parquet:8 is not a JSON object") as found:
        prepare([path], tmp_path / "out", options)
    assert "row group 1 is damaged" in found.value.found
    summary = prepare([path], tmp_path / "out", replace(options, text=TextOptions(bad_lines="skip")))
    assert (summary.documents, summary.bad_lines) == (32, 7)
    kept = documents(tmp_path / "out")
    made(tmp_path, tokenizer, [*ROWS[:7], *ROWS[14:]], overwrite=True)
    assert documents(tmp_path / "out") == kept


BAD = [
    ({"messages": [{"role": "user", "content": "Hi"}]}, "has no role that is trained"),
    ({"messages": [{"role": "user", "content": None}, ROWS[0]["messages"][1]]}, "message 0 has no text"),
    ({"messages": [*ROWS[0]["messages"], ROWS[0]["messages"][1]]}, "has roles out of order"),
    ({"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}, "has no 'messages'"),
    ("text", "is not a JSON object"),
]


@pytest.mark.parametrize(("bad", "what"), BAD)
def test_bad_rows_are_named_or_left_out_and_counted(tmp_path, tokenizer, bad, what):
    rows = [*ROWS[:3], bad, *ROWS[3:6]]
    with pytest.raises(CorpusError, match=rf"in\.jsonl:4 {what}") as found:
        made(tmp_path, tokenizer, rows)
    assert "--bad-lines skip" in str(found.value)
    summary = made(tmp_path, tokenizer, rows, text=TextOptions(bad_lines="skip"))
    assert (summary.documents, summary.bad_lines) == (6, 1)
    assert summary.first_left_out[0].endswith(f"in.jsonl:4 {what}") or what in summary.first_left_out[0]
    clean = tmp_path / "clean"
    clean.mkdir()
    made(clean, tokenizer, ROWS[:6])
    assert documents(clean / "out") == documents(tmp_path / "out")


def test_a_schema_that_changes_between_files_is_named(tmp_path, tokenizer):
    one = write(tmp_path / "a.jsonl", ROWS[:2])
    two = write(tmp_path / "b.jsonl", [BAD[3][0]])
    with pytest.raises(CorpusError, match=r"b\.jsonl:1 has no 'messages'") as found:
        prepare([one, two], tmp_path / "out", PrepareOptions(tokenizer=tokenizer, chat=ChatOptions()))
    assert "conversations" in found.value.found


def test_a_template_that_refuses_the_roles(tmp_path):
    gemma = write_tokenizer(tmp_path / "gemma", FAMILIES["gemma"])
    rows = [ROWS[0], {"messages": [{"role": "system", "content": "s"}, *ROWS[0]["messages"]]}]
    with pytest.raises(CorpusError, match=r"in\.jsonl:2 is refused by the chat template") as found:
        made(tmp_path, gemma, rows)
    assert "System role not supported" in str(found.value)
    assert made(tmp_path, gemma, rows, text=TextOptions(bad_lines="skip")).bad_lines == 1


def long_rows() -> list[Any]:
    turns = [turn for i in range(6) for turn in ROWS[i]["messages"]]
    return [{"messages": turns}, ROWS[30], ROWS[0]]


def test_conversations_that_are_too_long(tmp_path, tokenizer):
    rows = long_rows()
    made(tmp_path, tokenizer, rows)
    whole = documents(tmp_path / "out")
    limit = len(whole[0][0]) - 20
    assert len(whole[1][0]) < limit

    def again(how: Any, tokens: int) -> tuple[Any, list[Any]]:
        chat = ChatOptions(max_tokens=tokens, too_long=how)
        return made(tmp_path, tokenizer, rows, chat, overwrite=True), documents(tmp_path / "out")

    with pytest.raises(CorpusError, match=r"in\.jsonl:1 is too long") as found:
        again("error", limit)
    assert f"{len(whole[0][0])} tokens" in found.value.found
    summary, kept = again("skip", limit)
    assert (summary.too_long, summary.shortened, kept) == (1, 0, whole[1:])
    # The run that stopped goes on: what it finished holds nothing of this kind.
    summary, kept = again("cut", limit)
    assert (summary.too_long, summary.shortened) == (0, 1)
    assert kept == [(whole[0][0][:limit], whole[0][1][:limit]), *whole[1:]]
    summary, kept = again("turn", limit)
    assert (summary.too_long, summary.shortened) == (0, 1)
    tokens, mask = kept[0]
    assert limit - 40 < len(tokens) <= limit and whole[0][0][: len(tokens)] == tokens
    assert mask == whole[0][1][: len(tokens)] and mask[-2:] == [1, 0], "it ends with an answer, as the template ends it"
    summary, kept = again("turn", 24)
    assert (summary.too_long, summary.shortened, len(kept)) == (1, 1, 2)


@pytest.mark.parametrize("family", ["qwen3", "chatml"])
def test_too_long_keeps_the_most_turns_that_fit(tmp_path, family):
    """Also where a template leaves out earlier reasoning, so that more turns may be fewer tokens."""
    tokenizer = write_tokenizer(tmp_path / "model", FAMILIES[family])
    turns = [turn for i in range(8) for turn in ROWS[i]["messages"]]
    for i, words in enumerate((0, 60, 2, 90, 80, 1, 70, 60)):
        turns[2 * i + 1] = {**turns[2 * i + 1], "content": f"<think>\n{'how ' * words}\n</think>\n\nHello {i} !"}
    theirs = reference_tokenizer(tokenizer)
    ends = range(2, len(turns) + 1, 2)
    texts = [theirs.apply_chat_template(turns[:end], tokenize=False) for end in ends]
    lengths = [len(tokens) for tokens in theirs(texts, add_special_tokens=False)["input_ids"]]
    assert (lengths != sorted(lengths)) == (family == "qwen3")
    for limit in (*lengths[:-1], *(n - 1 for n in lengths)):
        fit = [k for k, n in enumerate(lengths) if n <= limit]
        chat = ChatOptions(max_tokens=limit, too_long="turn")
        made(tmp_path, tokenizer, [{"messages": turns}, ROWS[0]], chat, overwrite=True)
        kept = [len(tokens) for tokens, _ in documents(tmp_path / "out")]
        assert kept[:-1] == [lengths[k] for k in fit[-1:]], limit


def test_a_selection_is_part_of_the_corpus(tmp_path, tokenizer):
    rows = long_rows()
    made(tmp_path, tokenizer, rows)
    everything = IndexedSource(tmp_path / "out").fingerprint()
    made(tmp_path, tokenizer, rows, ChatOptions(selection=Selection(turns="last")), overwrite=True)
    last = IndexedSource(tmp_path / "out").fingerprint()
    assert (everything.lengths, everything.contents) == (last.lengths, last.contents)
    assert everything.trained != last.trained


def test_the_command(tmp_path, tokenizer, capsys):
    path = str(write(tmp_path / "chats.jsonl", [*long_rows(), BAD[0][0]]))
    words = ["prepare", path, "--output", str(tmp_path / "chat"), "--tokenizer", str(tokenizer), "--workers", "1"]
    assert main([*words, "--chat", "--train-turns", "last", "--max-tokens", "100", "--too-long", "turn"]) == 1
    assert "has no role that is trained" in capsys.readouterr().err
    more = ["--max-tokens", "100", "--too-long", "turn", "--bad-lines", "skip"]
    assert main([*words, "--chat", "--train-turns", "last", *more]) == 0
    out = capsys.readouterr().out
    assert (
        "tokens are trained" in out and "1 conversations were too long and are shorter" in out and "1 bad lines" in out
    )
    for flags, what in (
        (["--train", "assistant,tool"], "--train goes with --chat"),
        (["--chat", "--too-long", "cut"], "goes with --max-tokens"),
        (["--chat", "--train-parts", "words"], "bad --train"),
        (["--chat", "--chat-date", "today"], "bad --chat-date"),
        (["--chat", "--chat-template", str(tmp_path / "none")], "cannot be read"),
    ):
        assert main([*words, *flags]) == 2, flags
        assert what in capsys.readouterr().err


def test_a_row_that_can_be_read_in_two_ways(tmp_path, tokenizer):
    row = ROWS[0] | {"chosen": ROWS[0]["messages"], "rejected": ROWS[1]["messages"]}  # as UltraFeedback's are
    with pytest.raises(CorpusError, match="can be read in two ways") as error:
        made(tmp_path, tokenizer, [row])
    assert error.value.action == "--chat-rows messages or --chat-rows preference"
    assert made(tmp_path, tokenizer, [row], ChatOptions(shape="messages")).documents == 1


def test_no_template_and_no_tokenizer(tmp_path, tokenizer):
    path = write(tmp_path / "in.jsonl", ROWS[:2])
    with pytest.raises(UsageError, match="conversations need a tokenizer"):
        prepare([path], tmp_path / "out", PrepareOptions(chat=ChatOptions()))
    (tmp_path / "base").mkdir()
    shutil.copy(tokenizer / "tokenizer.json", tmp_path / "base")
    with pytest.raises(UsageError, match="has no chat template"):
        prepare([path], tmp_path / "out", PrepareOptions(tokenizer=tmp_path / "base", chat=ChatOptions()))
    config = {"chat_template": [{"name": "default", "template": GENERATION["chatml"]}]}
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps(config))
    assert prepare([path], tmp_path / "out", PrepareOptions(tokenizer=tmp_path / "base", chat=ChatOptions())).trained
    template = tmp_path / "bad.jinja"
    template.write_text("{% for %}")
    with pytest.raises(MegaresumeError, match="cannot be read"):
        prepare([path], tmp_path / "o", PrepareOptions(tokenizer=tokenizer, chat=ChatOptions(template=template)))
    assert not (tmp_path / "o.prepare").exists()


@pytest.mark.parametrize("index_only", [False, True])
def test_spans_of_other_turns_that_were_left_by_a_copy_are_refused(tmp_path, tokenizer, index_only):
    path = tmp_path / "in.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    path.write_text(json.dumps({"messages": turns}) + "\n")
    for role in ("user", "assistant"):
        (tmp_path / role).mkdir()
        chat = ChatOptions(selection=Selection(roles=(role,)))
        prepare([path], tmp_path / role / "chat", PrepareOptions(tokenizer=tokenizer, chat=chat, index_only=index_only))
    for file in (tmp_path / "assistant").iterdir():
        if file.suffix != ".spans":
            shutil.copy2(file, tmp_path / "user")
    with pytest.raises(CorpusError, match=r"user/chat\.spans is not of this corpus"):
        open_corpus(tmp_path / "user/chat")


def test_a_role_that_nobody_has_is_refused(tmp_path, tokenizer):
    tool = {"messages": [*ROWS[0]["messages"], {"role": "tool", "content": "7"}, *ROWS[1]["messages"]]}
    critic = {"messages": [*ROWS[0]["messages"], {"role": "critic", "content": "poor"}]}
    chat = ChatOptions(selection=Selection(roles=("assistant", "tol")))
    with pytest.raises(UsageError, match=r"(?s)a role that no message has: tol.*did you mean 'tool'"):
        made(tmp_path, tokenizer, [tool], chat)
    for roles, rows in ((("gpt", "tool"), [tool]), (("critic",), [critic])):
        chat = ChatOptions(selection=Selection(roles=roles), any_order=True)
        assert made(tmp_path, tokenizer, rows, chat, overwrite=True).trained > 0


@pytest.mark.parametrize("library", ["tokenizers", "jinja2"])
def test_a_missing_library_names_the_extra_of_conversations(tmp_path, tokenizer, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SetupError, match=r"megaresume\[chat\]"):
        made(tmp_path, tokenizer, ROWS)


def test_arguments_that_are_escaped_twice_are_hinted_at(tmp_path, caplog):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    )
    tokenizer = write_tokenizer(tmp_path / "model", FAMILIES["chatml"], template=template)
    for arguments, hinted in (('{"a": "b"}', True), ({"a": "b"}, False)):
        call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        caplog.clear()
        made(tmp_path, tokenizer, [ROWS[0], {"messages": [ROWS[0]["messages"][0], call]}], overwrite=True)
        assert ("write them as objects" in caplog.text) == hinted
