"""What is tried on which upstream."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.upstream.end_to_end import refused, resume_series, unpatched
from tests.upstream.launch import REPOSITORY, Layout, Setup
from tests.upstream.patches import patched_copy, refuses_recipe, try_recipe
from tests.upstream.results import Result
from tests.upstream.trees import Tree, compile_helpers, environment

PROBE = Path(__file__).with_name("probe.py")
CHECKS = ("detection", "seams", "hooks", "sampler", "guard")

TORCH, DIST = ("--ckpt-format", "torch"), ("--ckpt-format", "torch_dist")
#: without --use-persistent-ckpt-worker: that process is started anew, without the shim, and dies of having no CUDA.
ASYNC = (*DIST, "--async-save")
#: since 0.18 it is not the default, which needs a package of its own.
MCORE = ("--async-strategy", "mcore")
FOUR_LAYERS = ("--num-layers", "4")
DP2, DP1 = Layout(dp=2), Layout()
BOTH = [(DP2, DP1), (DP1, DP2)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A series of runs: one that is left alone, and one for each pair of layouts that is killed and resumed."""

    what: str
    mode: str
    flags: tuple[str, ...] = ()
    layouts: list[tuple[Layout, Layout]]
    is_split: bool = False
    counts_samples: bool = False
    zero: int = 0
    #: what the script trains by itself is compared too: the stock run has the same data and number of samples.
    is_stock: bool = False
    is_patched: bool = False


def _plain(*flags: str, layouts: list[tuple[Layout, Layout]] = BOTH) -> list[Case]:
    return [
        Case(what="guard", mode="guard", flags=flags, layouts=layouts, is_stock=True),
        Case(what="stream", mode="stream", flags=flags, layouts=layouts),
    ]


def _zero(stage: int) -> Case:
    # Its pipeline engine, which it uses unless told otherwise, goes with ZeRO 0 and 1 alone.
    flags = () if stage == 1 else ("--no-pipeline-parallel",)
    return Case(what=f"stream, ZeRO {stage}", mode="stream", flags=flags, layouts=[(DP2, DP2)], zero=stage)


_CP = ("--no-create-attention-mask-in-dataloader", *DIST)
_RAMP_UP = ("--rampup-batch-size", "4", "4", "16", *DIST)
#: 4 steps of 4, 4 of 8, 2 of 16; since 0.18 in the place of --rampup-batch-size. Counted in tokens.
_BATCH_SIZES = ("--step-batch-size-schedule", "0:4 1024:8 3072:16", *DIST)

#: upstream -> series. 0.12 writes torch_dist with functions that torch 2.13 and NumPy 2.4 no longer have.
CASES: dict[str, list[Case]] = {
    "0.12.0": _plain(*TORCH, layouts=[(DP2, DP1)]),
    "0.16.0": [
        *_plain(*DIST),
        Case(what="stream, patched script", mode="stream", flags=DIST, layouts=[(DP2, DP1)], is_patched=True),
        Case(what="guard, TP, --async-save", mode="guard", flags=ASYNC, layouts=[(Layout(tp=2), DP2)]),
        Case(what="guard, --dataloader-type cyclic", mode="guard", flags=("--dataloader-type", "cyclic", *DIST),
             layouts=[(DP2, DP2)]),
        Case(what="guard, ramp-up, --train-samples", mode="guard", flags=_RAMP_UP, layouts=[(DP2, DP1)],
             counts_samples=True),
    ],
    "0.19.0": [
        *_plain(*DIST, layouts=[(DP2, DP1)]),
        Case(what="stream, PP", mode="stream", flags=(*FOUR_LAYERS, *DIST), layouts=[(Layout(pp=2), DP2)]),
        Case(what="guard, --train-data-path", mode="guard", flags=DIST, layouts=[(DP2, DP1)], is_split=True),
    ],
    "main": [
        *_plain(*DIST, layouts=[(DP2, DP1)]),
        Case(what="stream, TP, --async-save", mode="stream", flags=(*ASYNC, *MCORE),
             layouts=[(Layout(tp=2), DP2)]),
        Case(what="stream, PP, VPP", mode="stream", flags=(*FOUR_LAYERS, *DIST), layouts=[(Layout(pp=2, vpp=2), DP2)]),
        Case(what="stream, CP", mode="stream", flags=_CP, layouts=[(Layout(cp=2), DP2)]),
        Case(what="stream, ramp-up, --train-samples", mode="stream", flags=_BATCH_SIZES, layouts=[(DP2, DP1)],
             counts_samples=True),
        Case(what="stream, --train-data-path", mode="stream", flags=DIST, layouts=[(DP2, DP1)], is_split=True),
    ],
    "dev": _plain(*DIST, layouts=[(DP2, DP1)]),
    "swiss-ai": _plain(*TORCH, layouts=[(DP2, DP1)]),
    "rocm": _plain(*TORCH, layouts=[(DP2, DP1)]),
    "deepspeedai": [
        *_plain(layouts=[(DP2, DP1)]),
        *map(_zero, (1, 2, 3)),
        Case(what="stream, patched script", mode="stream", layouts=[(DP2, DP1)], is_patched=True),
    ],
    "bigscience": _plain(layouts=[(DP2, DP1)]),
}  # fmt: skip

#: what is left in place of the loop that we know: the launcher must refuse.
REFUSED = {"flagscale": "stream: its own training loop calls copies of what we wrap"}

#: what needs a machine that nobody has here. Tried all the same: only this error counts.
ELSEWHERE = {"mindspeed-llm": ("needs an Ascend NPU with torch_npu and MindSpeed", "No module named")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """The machine."""

    #: version -> executable.
    pythons: dict[str, Path]
    cuda: bool
    scratch: Path
    corpora: dict[str, tuple[Path, str]]


def static(tree: Tree, where: Where) -> list[Result]:
    """Everything but training."""
    python = where.pythons.get(tree.upstream.python)
    if python is None:
        return [Result.not_run(tree.name, check, f"needs Python {tree.upstream.python}") for check in CHECKS]
    compile_helpers(tree, python)
    prefixes = [str(path) for path, _ in where.corpora.values()]
    env = environment(python) | {"PYTHONPATH": os.pathsep.join([*tree.path, str(REPOSITORY)])}
    done = subprocess.run(
        [str(python), str(PROBE), tree.kind, *prefixes], env=env, capture_output=True, text=True, timeout=1800
    )
    (where.scratch / f"probe-{tree.name}.txt").write_text(done.stderr)
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        tail = " ".join(done.stderr.split())[-200:]
        return [Result.failed(tree.name, "detection", f"the probe ended with {done.returncode}: {tail}")]
    results = [Result(upstream=tree.name, what=what, status=status, detail=detail) for what, status, detail in found]
    return [*results, *_patches(tree, python)]


def _patches(tree: Tree, python: Path) -> Iterator[Result]:
    if tree.kind == "unsupported" or tree.name in REFUSED:
        yield refuses_recipe(tree, python)
        return
    for name in (tree.upstream.script, *tree.upstream.also):
        result = try_recipe(tree, python, name)
        if result is not None:
            yield result


def runs(tree: Tree, where: Where) -> Iterator[Result]:
    """End to end, where that is possible."""
    if tree.name not in {*CASES, *REFUSED, *ELSEWHERE}:
        return
    python = where.pythons.get(tree.upstream.python)
    if python is None:
        yield Result.not_run(tree.name, "end to end", f"needs Python {tree.upstream.python}")
        return
    compile_helpers(tree, python)
    folder = _fresh(where, tree, "stock")
    setup = Setup(
        tree=tree,
        python=python,
        cuda=where.cuda,
        corpora=where.corpora,
        folder=folder,
        mode="stock",
        flags=_flags(tree),
    )
    if tree.name in REFUSED:
        yield refused(setup.but(mode="stream", folder=_fresh(where, tree, "refused")), REFUSED[tree.name])
        return
    result, stock = unpatched(setup)
    if tree.name in ELSEWHERE and result.status == "failed" and ELSEWHERE[tree.name][1] in result.detail:
        yield Result.not_run(tree.name, "end to end", f"{ELSEWHERE[tree.name][0]}; here: {result.detail}")
        return
    yield result
    if stock is None:
        return
    for number, case in enumerate(CASES.get(tree.name, [])):
        changes: dict[str, Any] = {name: getattr(case, name) for name in ("mode", "is_split", "counts_samples", "zero")}
        changes["flags"] = case.flags
        if case.is_patched:
            try:
                changes["script"] = patched_copy(tree, python)
            except RuntimeError as error:
                yield Result.failed(tree.name, case.what, str(error))
                continue
        own = setup.but(folder=_fresh(where, tree, f"{number}-{case.mode}"), **changes)
        yield from resume_series(own, case.what, stock if case.is_stock else None, case.layouts)


def _flags(tree: Tree) -> tuple[str, ...]:
    """Of the run without megaresume, which guard mode is compared with."""
    return next((case.flags for case in CASES.get(tree.name, [])), DIST)


def _fresh(where: Where, tree: Tree, name: str) -> Path:
    folder = where.scratch / "runs" / tree.name / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
