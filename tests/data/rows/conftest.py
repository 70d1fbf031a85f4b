"""The same texts in every raw format, and what a slow reader of each makes of them."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pyarrow = pytest.importorskip("pyarrow")
tokenizers = pytest.importorskip("tokenizers")

EOD = "<|endoftext|>"


def texts(seed: int, count: int) -> list[str]:
    """Some are empty, some long, some with characters of several bytes."""
    rng = np.random.default_rng(seed)
    words = ["fox", "größe", "the", "日本", "dog", "🦊", "over", " ", "lazy", "x\ny"]
    return [" ".join(rng.choice(words, rng.integers(0, 120))) if k % 17 else "" for k in range(count)]


def lines(rows: list[str]) -> bytes:
    """JSON lines, some with blank lines and Windows ends between them."""
    ends = ("\n", "\n\n", "\r\n")
    return "".join(
        json.dumps({"id": k, "text": row}, ensure_ascii=k % 2 == 0) + ends[k % 3] for k, row in enumerate(rows)
    ).encode()


def write_parquet(path: Path, rows: list[str], group: int = 70, column: str = "text") -> None:
    from pyarrow import parquet

    table = pyarrow.table({"id": range(len(rows)), column: rows, "raw": [b"\xff"] * len(rows)})
    # Plain, so that another text of as many bytes is a file of as many bytes.
    parquet.write_table(table, path, row_group_size=group, compression="none", use_dictionary=False)


def write_arrow(path: Path, rows: list[str], kind: str = "stream") -> None:
    table = pyarrow.table({"text": rows, "raw": [b"\xff"] * len(rows)})
    new = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=60)


def write(directory: Path, name: str, rows: list[str]) -> Path:
    """A file of one format, by its name."""
    path = directory / name
    if name.endswith(".parquet"):
        write_parquet(path, rows)
    elif name.endswith(".arrow"):
        write_arrow(path, rows, "file" if "file" in name else "stream")
    else:
        data = lines(rows)
        if name.endswith(".zst"):
            data = pytest.importorskip("zstandard").compress(data)
        pack: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
        path.write_bytes(pack.get(path.suffix, bytes)(data))
    return path


#: of every format two files.
FORMATS = {
    "jsonl": ("a.jsonl", "b.jsonl"),
    "zstd": ("a.jsonl.zst", "b.jsonl.zst"),
    "others": ("a.jsonl.gz", "b.jsonl.bz2", "c.jsonl.xz"),
    "parquet": ("a.parquet", "b.parquet"),
    "arrow": ("a.arrow", "b-file.arrow"),
    "mixed": ("a.parquet", "b.jsonl", "c.jsonl.gz", "d.arrow"),
}


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[EOD],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(99, 100), trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where compressed files are unpacked."""
    monkeypatch.setenv("MEGARESUME_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
