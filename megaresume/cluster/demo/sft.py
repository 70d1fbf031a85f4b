"""The demo of conversations: questions and answers about this machine's Python, blended with plain text.

    what does json.dumps do?       its docstring      conversations through a chat template: answers are trained
    show me its code               its source         whole documents
    the manual                                        text: every token is trained, split to fill the rest

Which tokens were trained is not taken from any file: independent code (`what_is_trained`) derives it from the tokens
that the model was given. So this module is also the program that the demo starts and kills: the reference program, in
which each rank writes the tokens, labels and masks of every sample before its model gets them, one line per sample; a
kill truncates the last line.

    {"sample": 17, "tokens": "...", "position_ids": "...", "labels": "...", "loss_mask": "..."}     int32, hexadecimal
"""

from __future__ import annotations

import ast
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megaresume.cluster.demo.demo import SEQ_LENGTH, TEXT, Demo, Extra, functions, write_config, write_texts
from megaresume.cluster.processes import ask
from megaresume.cluster.scenario import Say
from megaresume.render import escape

#: The special tokens, from 256 on, as `masks` knows them; every byte is also a token.
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: limit on the bytes of an answer, so that conversations differ in their number of turns.
_LONGEST_ANSWER = 160
#: The weights, in trained tokens.
WEIGHTS = {"chat": 0.6, "manual": 0.4}


def conversations() -> Iterator[list[dict[str, str]]]:
    """Questions about functions, answered by docstring and source; one to three functions per conversation."""
    turns: list[dict[str, str]] = []
    wanted = itertools.cycle((1, 2, 3))
    left = next(wanted)
    for text, node in functions():
        doc = (ast.get_docstring(node) or "").partition("\n\n")[0].strip()
        if not 8 < len(doc.encode()) <= _LONGEST_ANSWER:
            continue
        turns += _asked(f"What does {node.name} do?", doc)
        if len(text.encode()) <= _LONGEST_ANSWER:
            turns += _asked("Show me its code.", text.strip())
        left -= 1
        if not left:
            yield turns
            turns, left = [], next(wanted)


def _asked(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_tokenizer(directory: Path) -> Path:
    """A tokenizer of bytes and `SPECIAL`, with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = _letters_of_bytes()
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory


def _letters_of_bytes() -> list[str]:
    """The letter by which the library writes each byte: itself if printable, otherwise one from U+0100 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]


def _prepare(out: Path, say: Say) -> Path:
    model = write_tokenizer(out / "tokenizer")
    chats = out / "texts" / "chat.jsonl"
    text = write_texts(out / "texts")["manual"]
    chats.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in conversations()), encoding="utf-8")
    common = ("--tokenizer", str(model))
    longest = ("--max-tokens", str(SEQ_LENGTH), "--too-long", "turn")
    made = ask("prepare", str(chats), "--output", str(out / "corpora" / "chat"), *common, "--chat", *longest)
    say(f"   chat: {made['documents']:,} conversations, {made['tokens']:,} tokens, {made['trained']:,} of them trained")
    made = ask("prepare", str(text), "--output", str(out / "corpora" / "manual"), *common)
    say(f"   manual: {made['documents']:,} documents, {made['tokens']:,} tokens")
    sources: dict[str, Any] = {name: {"path": f"corpora/{name}", "weight": w} for name, w in WEIGHTS.items()}
    sources["manual"]["packing"] = "split"
    return write_config(out / "data.yaml", sources, blend={"unit": "trained"})


def _extra(out: Path) -> Extra:
    """Compare every mask that any rank of any start was given with the twin's, and with what the tokens imply."""
    twin, run = read_given(out, "twin"), read_given(out, "run")
    wrong = [*compare_masks(twin, run), *what_is_trained(twin), *what_is_trained(run)]
    places = sum(one.tokens.size for one in run)
    trained = sum(int(one.trained.sum()) for one in run)
    rows = (
        ("masks, token by token", "identical" if not wrong else f"DIFFERENT: {wrong[0]}, and {len(wrong) - 1} more"),
        ("tokens compared", f"{places:,}, {trained:,} of them trained, in {len(run)} samples of all starts"),
    )
    result = {"masks_compared": places, "masks_trained": trained, "masks_different": len(wrong)}
    return Extra(rows=rows, parts=tuple(_page(run, wrong)), result=result, holds=not wrong and trained > 0)


def _page(run: list[Given], wrong: list[Wrong]) -> Iterator[str]:
    yield "<h2>What was trained</h2><p>The last sample; tokens whose loss counted are marked.</p>"
    last = max(run, key=lambda one: one.sample)
    yield f"<pre>{_marked(last.tokens, last.trained)}</pre>"
    if wrong:
        yield "<p class='verdict fails'>" + escape("; ".join(map(str, wrong[:10]))) + "</p>"


def _marked(tokens: npt.NDArray[np.int64], trained: npt.NDArray[np.bool_]) -> str:
    """The text; a token is marked if the position before it is trained."""
    marks = [False, *trained[:-1].tolist()]
    parts = []
    for marked, places in itertools.groupby(range(len(tokens)), key=lambda i: marks[i]):
        pieces = (SPECIAL[t - 256].encode() if t >= 256 else bytes([t]) for t in (int(tokens[i]) for i in places))
        words = escape(b"".join(pieces).decode("utf-8", "replace"))
        parts.append(f"<mark>{words}</mark>" if marked else words)
    return "".join(parts)


_NAMES = ("tokens", "position_ids", "labels", "loss_mask")
_END_OF_HEADER = ord("\n")
#: The ids of the special tokens.
END_OF_TEXT, IM_START, IM_END = 256, 257, 258


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """One sample as a model was given it; all arrays have S positions."""

    sample: int
    #: the tokens, int64.
    tokens: npt.NDArray[np.int64]
    #: the position ids: 0 where a document, or the padding, begins.
    positions: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    #: whether the label is trained.
    trained: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Wrong:
    """A position that is not as expected."""

    sample: int
    place: int
    what: str

    def __str__(self) -> str:
        return f"sample {self.sample}, place {self.place}: {self.what}"


def write_given(log: Path, rank: int, batch: Mapping[str, Any]) -> None:
    """Append the samples of a micro-batch to the file of a rank.

    Args:
        log: of the run, ``--megaresume-log-samples``.
        rank: of this process.
        batch: tensors on the CPU: ``samples`` int64[m], tokens, positions, labels and mask [m, S].
    """
    arrays = {name: batch[name].numpy() for name in _NAMES}
    lines = []
    for row, sample in enumerate(batch["samples"].tolist()):
        words = {name: array[row].astype("<i4").tobytes().hex() for name, array in arrays.items()}
        lines.append(json.dumps({"sample": sample, **words}))
    with open(f"{log}.rank{rank}", "ab", buffering=0) as file:
        file.write("".join(f"\n{line}" for line in lines).encode() + b"\n")  # never continues a truncated line


def read_given(directory: Path, name: str) -> list[Given]:
    """All samples that the ranks of all starts of a run were given, sorted by number."""
    found = []
    for path in sorted(directory.glob(f"{name}.jsonl.rank*")):
        for line in filter(None, path.read_bytes().split(b"\n")):
            try:
                fields = json.loads(line)
            except ValueError:
                continue  # truncated by a kill
            tokens, positions, labels, mask = (
                np.frombuffer(bytes.fromhex(fields[name]), "<i4").astype(np.int64) for name in _NAMES
            )
            found.append(Given(fields["sample"], tokens, positions, labels, mask != 0))
    return sorted(found, key=lambda one: one.sample)


def compare_masks(twin: Iterable[Given], run: Iterable[Given]) -> Iterator[Wrong]:
    """Each position of the run that differs from its twin's; and samples that only one of them has."""
    by_sample = {one.sample: one for one in twin}
    seen = set()
    for one in run:
        seen.add(one.sample)
        other = by_sample.get(one.sample)
        if other is None:
            yield Wrong(one.sample, 0, "the twin never had it")
            continue
        for name in ("tokens", "positions", "labels", "trained"):
            for place in np.flatnonzero(getattr(one, name) != getattr(other, name)).tolist():
                what = f"{name} {getattr(one, name)[place]}, the twin's {getattr(other, name)[place]}"
                yield Wrong(one.sample, place, what)
    yield from (Wrong(sample, 0, "the run never had it") for sample in sorted(by_sample.keys() - seen))


def what_is_trained(given: Iterable[Given]) -> Iterator[Wrong]:
    """Each position whose mask is not what the tokens of the sample imply.

    A document that begins with `IM_START` is a conversation: the assistant's words are trained, and the token that ends
    them. In plain text, every token is trained; only zeros are padding.
    that ends them. Of a text every token is trained; zeros alone are padding.

    Args:
        given: samples of bytes and special tokens.
    """
    for one in given:
        starts = np.flatnonzero(one.positions == 0).tolist()
        for first, stop in zip(starts, [*starts[1:], len(one.tokens)], strict=True):
            expected = _expected(one.tokens[first:stop].tolist())
            for place in np.flatnonzero(one.trained[first:stop] != expected).tolist():
                yield Wrong(
                    one.sample, first + place, f"trained {one.trained[first + place]}, its tokens say otherwise"
                )


def _expected(tokens: list[int]) -> list[bool]:
    """Whether each position is trained: if the next token is to be learned."""
    if tokens[0] != IM_START:
        text = any(tokens)
        # Nothing follows the end of a document; split text continues in another sample.
        return [text] * (len(tokens) - 1) + [text and tokens[-1] != END_OF_TEXT]
    learned, role, answers = [], None, False
    for token in tokens:
        learned.append(answers)
        if token == IM_START:
            role = b""
        elif token == IM_END:
            answers = False
        elif role is not None and token == _END_OF_HEADER:
            answers, role = role == b"assistant", None
        elif role is not None:
            role += bytes([token])
    return [*learned[1:], False]


SFT = Demo(
    title="megaresume demo --sft",
    program="megaresume.cluster.demo.sft",
    steps=60,
    data="conversations about this machine's Python, and its manual as text",
    content="tokens, labels, masks and positions",
    packing="No conversation was cut; text fills what they leave.",
    prepare=_prepare,
    flags=TEXT.flags,
    extra=_extra,
)


def _train() -> int:
    """The reference program, changed to write down every micro-batch before it is trained."""
    import torch.distributed as dist

    from megaresume.cluster.training.__main__ import main
    from megaresume.cluster.training.loop import Trainer

    losses = Trainer._token_losses

    def recorded(self: Trainer, batch: Any) -> Any:
        write_given(Path(str(self.args.megaresume_log_samples)), dist.get_rank(), batch)
        return losses(self, batch)

    Trainer._token_losses = recorded  # type: ignore[method-assign]
    return main()


if __name__ == "__main__":
    sys.exit(_train())
