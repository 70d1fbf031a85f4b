"""What is tried on which upstream."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.upstream.end_to_end import resume_series, unpatched
from tests.upstream.launch import REPOSITORY, Setup
from tests.upstream.patches import SCRIPTS, patched_copy, try_recipe
from tests.upstream.results import Result
from tests.upstream.trees import Tree, compile_helpers, environment

__all__ = ["CHECKS", "Where", "runs", "static"]

PROBE = Path(__file__).with_name("probe.py")
CHECKS = ("detection", "seams", "hooks", "sampler", "guard")

#: upstream -> (checkpoint format flags) of its end-to-end runs. 0.12 writes torch_dist with functions that torch 2.13
#: and NumPy 2.4 no longer have.
_RUNS: dict[str, tuple[str, ...]] = {
    "0.12.0": ("--ckpt-format", "torch"),
    "0.16.0": ("--ckpt-format", "torch_dist"),
    "0.19.0": ("--ckpt-format", "torch_dist"),
    "deepspeedai": (),
    "bigscience": (),
}
_LAYOUTS = [(2, 1), (1, 2)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """The machine."""

    #: version -> executable.
    pythons: dict[str, Path]
    shim_dir: Path | None
    scratch: Path
    corpora: dict[str, tuple[Path, str]]

    def python_for(self, tree: Tree) -> Path | None:
        """The Python that can run a tree: Megatron-LM needs 3.12 from 0.17 on."""
        is_new = tree.kind == "megatron-lm" and tuple(map(int, tree.name.split(".")[:2])) >= (0, 17)
        return self.pythons.get("3.12" if is_new else "3.11")


def static(tree: Tree, where: Where) -> list[Result]:
    """Everything but training."""
    python = where.python_for(tree)
    if python is None:
        return [Result.not_run(tree.name, check, "needs Python 3.12: give --python312") for check in CHECKS]
    compile_helpers(tree, python)
    prefixes = [str(path) for path, _ in where.corpora.values()]
    env = environment(python) | {"PYTHONPATH": os.pathsep.join([str(tree.root), str(REPOSITORY)])}
    done = subprocess.run(
        [str(python), str(PROBE), tree.kind, *prefixes], env=env, capture_output=True, text=True, timeout=600
    )
    (where.scratch / f"probe-{tree.name}.txt").write_text(done.stderr)
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        tail = " ".join(done.stderr.split())[-200:]
        return [Result.failed(tree.name, "detection", f"the probe ended with {done.returncode}: {tail}")]
    results = [Result(upstream=tree.name, what=what, status=status, detail=detail) for what, status, detail in found]
    return results + [result for name in SCRIPTS if (result := try_recipe(tree, python, name)) is not None]


def runs(tree: Tree, where: Where) -> Iterator[Result]:
    """End to end, where that is possible."""
    if tree.name not in _RUNS:
        return
    python = where.python_for(tree)
    if python is None:
        yield Result.not_run(tree.name, "end to end", "needs Python 3.12: give --python312")
        return
    if where.shim_dir is None and not _has_cuda(python):
        yield Result.not_run(tree.name, "end to end", "needs a CUDA device, or the shims: give --shim-dir")
        return
    compile_helpers(tree, python)
    setup = Setup(
        tree=tree,
        python=python,
        shim_dir=where.shim_dir,
        corpora=where.corpora,
        folder=_fresh(where, tree, "stock"),
        mode="stock",
        flags=_RUNS[tree.name],
    )
    result, stock = unpatched(setup)
    yield result
    if stock is None:
        return
    for mode in ("guard", "stream"):
        of_mode = setup.but(mode=mode, folder=_fresh(where, tree, mode))
        yield from resume_series(of_mode, stock if mode == "guard" else None, _LAYOUTS)
    if tree.kind == "megatron-deepspeed":
        for zero in (1, 2, 3):
            # Its pipeline engine, which it uses unless told otherwise, goes with ZeRO 0 and 1 alone.
            flags = () if zero == 1 else ("--no-pipeline-parallel",)
            of_stage = setup.but(mode="stream", zero=zero, flags=flags, folder=_fresh(where, tree, f"zero{zero}"))
            yield from resume_series(of_stage, None, [(2, 2)])
    if tree.name in ("0.16.0", "deepspeedai"):
        try:
            script = patched_copy(tree, python)
        except RuntimeError as error:
            yield Result.failed(tree.name, "patched script", str(error))
            return
        patched = setup.but(mode="stream", script=script, folder=_fresh(where, tree, "patched"))
        yield from resume_series(patched, None, [(2, 1)])


def _fresh(where: Where, tree: Tree, name: str) -> Path:
    import shutil

    folder = where.scratch / "runs" / tree.name / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _has_cuda(python: Path) -> bool:
    command = [str(python), "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"]
    return subprocess.run(command, capture_output=True).returncode == 0
