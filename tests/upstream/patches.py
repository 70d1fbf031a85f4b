"""The recipes on the unmodified scripts of an upstream."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.upstream.launch import REPOSITORY
from tests.upstream.results import Result
from tests.upstream.trees import Tree, environment


def _patch(python: Path, script: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "megaresume", "patch", str(script), *flags]
    return subprocess.run(command, cwd=REPOSITORY, env=environment(python), capture_output=True, text=True)


def try_recipe(tree: Tree, python: Path, name: str) -> Result | None:
    """Apply, apply again, check, revert one script of a tree; None: the tree has no such script."""
    script = tree.root / name
    if not script.exists():
        return None
    what, original = f"patch {'vlm' if 'vlm' in name else 'gpt'}", script.read_bytes()
    try:
        steps = (((), 0), (("--check",), 0), ((), 0), (("--revert",), 0), (("--check",), 1))
        contents: list[bytes] = []
        for flags, expected in steps:
            done = _patch(python, script, *flags)
            if done.returncode != expected:
                said = " ".join((done.stderr or done.stdout).split())[:250]
                return Result.failed(tree.name, what, f"patch {' '.join(flags)}: exit status {done.returncode}: {said}")
            contents.append(script.read_bytes())
            compile(contents[-1], str(script), "exec")
        applied, checked, again, reverted, _ = contents
        if applied == original or not applied == checked == again:
            return Result.failed(tree.name, what, "patching twice is not patching once")
        return Result.of(tree.name, what, None if reverted == original else "--revert did not restore the bytes")
    finally:
        script.write_bytes(original)


def refuses_recipe(tree: Tree, python: Path) -> Result:
    """Every recipe must be refused, and the script left as it is."""
    original = tree.script.read_bytes()
    done = _patch(python, tree.script)
    said = " ".join((done.stderr or done.stdout).split())[:250]
    if done.returncode == 1 and tree.script.read_bytes() == original and "next action" in done.stderr:
        return Result(upstream=tree.name, what="patch gpt", status="refused", detail=said)
    return Result.failed(tree.name, "patch gpt", f"not refused: exit status {done.returncode}: {said}")


def patched_copy(tree: Tree, python: Path) -> Path:
    """A patched copy of pretrain_gpt.py beside the original.

    Raises:
        RuntimeError: the recipe does not apply.
    """
    script = tree.root / "pretrain_gpt_patched.py"
    script.write_bytes((tree.root / "pretrain_gpt.py").read_bytes())
    done = _patch(python, script)
    if done.returncode:
        raise RuntimeError(" ".join((done.stderr or done.stdout).split())[:300])
    return script
