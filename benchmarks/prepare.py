"""`megaresume prepare` beside Megatron's preprocess_data.py and datatrove: the same text, tokenizer and core, one run.

    MEGARESUME_BENCH_MEGATRON=DIR      a clone of Megatron-LM that this Python can import
    MEGARESUME_BENCH_DATATROVE=PYTHON  a Python that has datatrove, with orjson

What is not there is left out, and said. Each is a whole process, in processor time; what it takes for one document is
subtracted, so that imports do not count. All three must write the same bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import interleaved, median, ratio

#: characters of a document, and tokens of the vocabulary.
DOCUMENT, VOCABULARY = 3000, 32_000
_DATATROVE = """
import sys
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import MegatronDocumentTokenizer
text, output, tokenizer = sys.argv[1:]
folder, _, name = text.rpartition("/")
writer = MegatronDocumentTokenizer(output, tokenizer_name_or_path=tokenizer, eos_token="<|endoftext|>")
writer.run(JsonlReader(folder, glob_pattern=name).run(None, 0, 1))
"""

#: (input, number of the run) -> the .bin that it wrote.
Program = Callable[[Path, str], Path]


def rows(setup: Setup) -> Iterator[Row]:
    """Tokens a second against each of the others that is there."""
    directory = setup.directory / "prepare"
    text = _write_text(directory, setup.sizes.packed_documents * 60)
    programs = _programs(directory, train_tokenizer(directory, text))
    written: dict[str, bytes] = {}

    def measured(name: str, input_: Path) -> Callable[[int], None]:
        def run(_: int) -> None:
            output = programs[name](input_, name)
            if input_ is text:
                written[name] = output.read_bytes()

        return run

    runs = {(name, path): measured(name, path) for name in programs for path in (text, directory / "one.jsonl")}
    by_key = {f"{name} {path.name}": run for (name, path), run in runs.items()}
    seconds = interleaved(by_key, setup.sizes.slow_repetitions, clock=_of_children, warm_up=False)
    assert len(set(written.values())) == 1, "they do not make the same tokens"
    tokens = len(written["megaresume"]) // 2
    of = {
        name: [
            long - short
            for long, short in zip(seconds[f"{name} text.jsonl"], seconds[f"{name} one.jsonl"], strict=True)
        ]
        for name in programs
    }
    for name in programs:
        if name == "megaresume":
            continue
        times = ratio(of["megaresume"], of[name])
        yield Row(
            what="prepare of JSON lines, byte-level BPE, one core",
            ours=tokens / median(of["megaresume"]) / 1e3,
            unit="k tokens/s",
            baseline=tokens / median(of[name]) / 1e3,
            against=name,
            ratio=times,
            must=">= 0.95 x",
            holds=times >= LEAST,
        )
    yield _while_training(text, directory, tokens / median(of["megaresume"]) / 1e3)


def _while_training(text: Path, directory: Path, prepared: float) -> Row:
    """Tokens a second of a corpus without a .bin, a document at a time in a shuffled order, beside `prepare`."""
    from megaresume.data.prepare.corpus import PrepareOptions, prepare
    from megaresume.data.row_source import RowSource

    prepare([text], directory / "rows", PrepareOptions(tokenizer=directory / "model", index_only=True))
    source = RowSource(directory / "rows")
    order = np.random.default_rng(0).permutation(len(source)).tolist()
    source.get(0)
    begin = time.process_time()
    tokens = sum(len(source.get(i)) for i in order)
    ours = tokens / (time.process_time() - begin) / 1e3
    return Row(
        what="tokens made of JSON lines while they are trained on, one core",
        ours=ours,
        unit="k tokens/s",
        baseline=prepared,
        against="megaresume prepare",
        ratio=ours / prepared,
        must=">= 0.6 x",
        holds=ours >= 0.6 * prepared,
    )


#: both call the same tokenizer for nine tenths of the time, and two runs of one program differ by this much.
LEAST = 0.95


def _write_text(directory: Path, size: int) -> Path:
    """The sources of this Python as JSON lines, ``text.jsonl``; the first of them alone, ``one.jsonl``."""
    directory.mkdir()
    lines: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if size <= 0:
            break
        if "site-packages" not in path.parts:
            whole = path.read_text("utf-8", "replace")[:size]
            size -= len(whole)
            lines += [json.dumps({"text": whole[i : i + DOCUMENT]}) + "\n" for i in range(0, len(whole), DOCUMENT)]
    (directory / "text.jsonl").write_text("".join(lines))
    (directory / "one.jsonl").write_text(lines[0])
    return directory / "text.jsonl"


def train_tokenizer(directory: Path, text: Path) -> Path:
    """``directory/model``, of JSON lines."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((json.loads(line)["text"] for line in text.read_text().splitlines()), trainer)
    model = directory / "model"
    model.mkdir()
    tokenizer.save(str(model / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    return model


def _programs(directory: Path, model: Path) -> dict[str, Program]:
    def ours(text: Path, name: str) -> Path:
        output = directory / name
        words = ["-m", "megaresume", "prepare", str(text), "--output", str(output), "--tokenizer", str(model)]
        _call(sys.executable, *words, "--workers", "1", "--overwrite")
        return output.with_suffix(".bin")

    found: dict[str, Program] = {"megaresume": ours}
    clone, python = os.environ.get("MEGARESUME_BENCH_MEGATRON"), os.environ.get("MEGARESUME_BENCH_DATATROVE")
    if clone:

        def megatron(text: Path, name: str) -> Path:
            output = directory / "megatron"
            words = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(model), "--append-eod"]
            words += ["--input", str(text), "--output-prefix", str(output), "--workers", "1"]
            _call(sys.executable, f"{clone}/tools/preprocess_data.py", *words, path=clone)
            return directory / "megatron_text_document.bin"

        found["Megatron's preprocess_data.py"] = megatron
    else:
        print("benchmarks: prepare without Megatron-LM: MEGARESUME_BENCH_MEGATRON=CLONE", file=sys.stderr)
    if python:

        def datatrove(text: Path, name: str) -> Path:
            _call(python, "-c", _DATATROVE, str(text), str(directory / name), str(model / "tokenizer.json"))
            return directory / name / "00000_tokens.bin"

        found["datatrove"] = datatrove
    else:
        print("benchmarks: prepare without datatrove: MEGARESUME_BENCH_DATATROVE=PYTHON", file=sys.stderr)
    return found


def _call(*words: str, path: str | None = None) -> None:
    env = os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"PYTHONPATH": path} if path is not None else {}
    subprocess.run(words, check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _of_children() -> float:
    """Processor time of all processes that have ended, and of theirs, seconds."""
    times = os.times()
    return times.children_user + times.children_system
