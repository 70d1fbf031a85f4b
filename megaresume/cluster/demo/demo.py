"""The parts of a demo, what its small models share with those of `megaresume smoke`, and the text demo.

It trains a GPT on three corpora of text that every Python installation has: its sources, the docstrings in them, and
its reference manual.
"""

from __future__ import annotations

import ast
import json
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megaresume.cluster.processes import ask
from megaresume.cluster.scenario import Say
from megaresume.stream.errors import counted

#: Tokens of a sample, and samples of a step.
SEQ_LENGTH, GLOBAL_BATCH_SIZE = 256, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoStart:
    """One start of the training program."""

    processes: int
    workers: int
    #: samples of a micro-batch.
    micro_batch_size: int
    start_method: str | None = None
    #: fraction of the run's steps after which everything is killed, in the middle of the next step; None: never.
    killed_after: float | None = None

    nodes = 1

    @property
    def ranks_per_node(self) -> int:
        """The ranks per node, for `megaresume.cluster.scenario`."""
        return self.processes

    ranks = ranks_per_node

    def __str__(self) -> str:
        processes = f"{self.processes} process" + ("es" if self.processes > 1 else "")
        how = f" ({self.start_method})" if self.start_method else ""
        return f"{processes}, micro-batch {self.micro_batch_size}, {counted(self.workers, 'worker')}{how}"


def write_config(path: Path, sources: Mapping[str, Any], *, seq_length: int = SEQ_LENGTH, **kwargs: Any) -> Path:
    """Write a data config; return its path."""
    packing = {"mode": "best_fit", "open_bins": 16}
    config = {"seed": 1234, "seq_length": seq_length, "packing": packing, **kwargs, "sources": sources}
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


#: flags of a small vision encoder.
VISION = {"vision-num-layers": 1, "vision-hidden-size": 64, "vision-num-attention-heads": 4}


def small_gpt(steps: int) -> dict[str, object]:
    """Flags of a GPT that is small enough to train anywhere."""
    return {
        "num-layers": 2,
        "hidden-size": 64,
        "num-attention-heads": 4,
        "train-iters": steps,
        "lr": "3e-3",
        "min-lr": "3e-4",
        "lr-decay-style": "cosine",
        "lr-warmup-iters": max(steps // 20, 1),
        "seed": 1234,
    }


def as_words(flags: Mapping[str, object]) -> list[str]:
    """Flags as words of a command line."""
    return [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Extra:
    """A scenario's own results, beyond the comparison."""

    #: (what, result), for the terminal and the table of the report.
    rows: tuple[tuple[str, str], ...] = ()
    #: HTML of the report.
    parts: tuple[str, ...] = ()
    #: fields of the result.
    result: dict[str, Any] = field(default_factory=dict)
    #: whether the compared results are the same.
    holds: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Demo:
    """A demo: its data, its model and its steps."""

    #: the command, for the report's heading.
    title: str
    #: default number of steps of the run.
    steps: int
    #: the undisturbed run, and the starts of the one that is killed.
    twin: DemoStart = DemoStart(processes=2, workers=0, micro_batch_size=4)
    attempts: tuple[DemoStart, ...] = (
        DemoStart(processes=2, workers=0, micro_batch_size=4, killed_after=0.29),
        DemoStart(processes=1, workers=2, micro_batch_size=8, start_method="fork", killed_after=0.63),
        DemoStart(processes=2, workers=1, micro_batch_size=2, start_method="spawn"),
    )
    #: the data in words, and what the model gets of it besides which samples.
    data: str
    content: str
    #: what packing did not do; None if a sample is an item.
    packing: str | None = None
    #: the unit that the weights count.
    unit: str = "tokens"
    #: the training program, a module.
    program: str = "megaresume.cluster.training"
    #: packages whose versions are in the report.
    packages: tuple[str, ...] = ("torch", "deepspeed", "megatron-core")
    #: (directory of the demo, say) -> the data argument of the training program.
    prepare: Callable[[Path, Say], Path]
    #: (directory of the demo, steps) -> flags of the training program that every start shares.
    flags: Callable[[Path, int], list[str]]
    #: (directory of the demo, that argument) -> the data config, after all runs.
    config: Callable[[Path, Path], Path] = lambda out, data: data
    #: directory of the demo, after all runs -> additional results.
    extra: Callable[[Path], Extra] = lambda out: Extra()


#: Source files and docstrings to take: enough for over a hundred steps, prepared in seconds.
NUM_FILES = 240
#: Articles of the manual longer than this are left out, so that the demo crosses an epoch of this source.
LONGEST_ARTICLE = 1800

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _files() -> list[Path]:
    """The first modules of the standard library, by name."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idlelib", "turtledemo", "__pycache__"}
    files = [p for p in sorted(root.rglob("*.py")) if not skipped & set(p.relative_to(root).parts)]
    return [p for p in files if p.stat().st_size > 200][:NUM_FILES]


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for path in _files():
        text = path.read_text(encoding="utf-8", errors="replace")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in the library's own sources
            try:
                yield text, ast.parse(text)
            except (SyntaxError, ValueError):
                continue


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions and methods, with their source: whole modules would fill a hundred samples each."""
    for text, module in _modules():
        lines = text.splitlines(keepends=True)
        for node in module.body:
            for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
                if isinstance(inner, _FUNCTIONS):
                    yield textwrap.dedent("".join(lines[inner.lineno - 1 : inner.end_lineno])), inner


def _code() -> Iterator[str]:
    return (source for source, _ in functions())


def _docstrings() -> Iterator[str]:
    for _, module in _modules():
        for node in ast.walk(module):
            doc = ast.get_docstring(node) if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)) else None
            if doc:
                yield doc


def _manual() -> Iterator[str]:
    from pydoc_data.topics import topics

    for _, article in sorted(topics.items()):
        if len(article) <= LONGEST_ARTICLE:
            yield article


#: name -> (texts, weight).
SOURCES: dict[str, tuple[Callable[[], Iterator[str]], str]] = {
    "code": (_code, "0.5"),
    "docstrings": (_docstrings, "0.3"),
    "manual": (_manual, "0.2"),
}


def write_texts(directory: Path) -> dict[str, Path]:
    """Write each source as JSON lines; name -> file."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, (texts, _) in SOURCES.items():
        paths[name] = directory / f"{name}.jsonl"
        with open(paths[name], "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts())
    return paths


def _prepare(out: Path, say: Say) -> Path:
    """Build the corpora with ``megaresume prepare``."""
    for name, path in write_texts(out / "texts").items():
        summary = ask("prepare", str(path), "--output", str(out / "corpora" / name))
        say(f"   {name}: {summary['documents']:,} documents, {summary['tokens']:,} tokens")
    sources = {name: {"path": f"corpora/{name}", "weight": float(weight)} for name, (_, weight) in SOURCES.items()}
    return write_config(out / "data.yaml", sources)


def _flags(out: Path, steps: int) -> list[str]:
    return as_words(small_gpt(steps) | {"global-batch-size": GLOBAL_BATCH_SIZE, "save-interval": 8})


TEXT = Demo(
    title="megaresume demo",
    steps=100,
    data="three corpora from the texts of this machine's Python",
    content="tokens, labels, masks and positions",
    packing="Only documents longer than a sample were cut.",
    prepare=_prepare,
    flags=_flags,
)
