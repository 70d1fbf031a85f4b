"""docs/compatibility.md, from the results."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.upstream.results import Result

__all__ = ["versions", "write"]

_HEAD = """\
# Compatibility

Which upstreams megaresume was tried on, what was tried, and what came out. This file is written by a program; nothing
in it is written by hand. To repeat it:

    python -m venv up311 && up311/bin/pip install -e . -r tests/upstream/requirements.txt
    python3.12 -m venv up312 && up312/bin/pip install -e . -r tests/upstream/requirements.txt
    up311/bin/python -m tests.upstream --python312 up312/bin/python \\
      --clone Megatron-LM --mds Megatron-DeepSpeed --bigscience bigscience-Megatron-DeepSpeed [--shim-dir DIR]

The three are git clones, the first with its tags; their trees are exported into a scratch folder (`--scratch`), and
nothing in the clones is touched. `--only 0.16.0 runs` repeats a part; the other results are kept in the scratch folder.
Upstream's training code needs CUDA. On a machine without it, `--shim-dir` names a folder with `cpu_cuda_shim.py` and
`mds_shim.py`, which make `cuda` mean the CPU for a test; with a GPU there is no such shim. Run it from a checkout that
nobody edits meanwhile: every run imports it anew. `pytest -m slow
tests/upstream` does the same with the paths in MEGARESUME_UPSTREAM_CLONE, _MDS, _BIGSCIENCE, _PYTHON312 and _SHIM_DIR.

**ok**: tried, and it held. **failed**: tried, and it did not; the reason is below the table. **not run**: this machine
or this Python cannot; the reason is below the table. **-**: the upstream has no such thing.

## Without training

| column | what is tried |
| --- | --- |
| detection | which project and version this is, from its files |
| seams | every name that we wrap exists, in the source |
| hooks | the modules import with the hooks installed, and every name is wrapped |
| sampler | the project's own sampler over our dataset: the same global batches in 6 layouts |
| guard | the project's own dataset builder: recording changes no sample; a run made longer keeps the recorded order |
| patch | the recipe on the script: applies, is idempotent, checks, and reverts byte for byte |
"""

_RUNS = """\
## End to end

The project's unmodified `pretrain_gpt.py`, started by `torchrun … -m megaresume.run pretrain_gpt.py …`: 10 iterations
with a global batch of 8, saving every 5, on a blend of three corpora. A rank is killed with SIGKILL in the middle of
step 7, and the run is resumed on another number of data-parallel ranks. What every rank's loader gave to every
micro-batch is logged from outside and compared, sample by sample and in order, with the uninterrupted run; in guard
mode that one is compared with the script running without megaresume. `inspect` and `verify` read the directory that
Megatron wrote. With ZeRO 1 to 3 the number of ranks stays: DeepSpeed loads its partitions on no other, and universal
checkpoints are not tried here.

Guard mode under either Megatron-DeepSpeed records and pins nothing, and says so when it starts: these rows show that
the script's samples and its own resume are left as they are. bigscience's imports need stand-ins on current releases,
with a GPU as well as without: `tests/upstream/bigscience_shim.py`.
"""

_CHECKS = ("detection", "seams", "hooks", "sampler", "guard", "patch pretrain_gpt.py", "patch pretrain_vlm.py")


def versions(python: Path) -> str:
    """Python and what matters in it."""
    program = (
        "import platform, importlib.metadata as m\n"
        "def v(n):\n  try: return m.version(n)\n  except m.PackageNotFoundError: return 'none'\n"
        "print('Python', platform.python_version(), end='')\n"
        "for name in ('torch', 'numpy', 'deepspeed'): print(',', name, v(name), end='')"
    )
    return subprocess.run([str(python), "-c", program], capture_output=True, text=True).stdout.strip()


def write(
    path: Path, results: dict[str, dict[str, list[Result]]], commits: dict[str, str], machines: dict[str, str]
) -> None:
    """Write the document."""
    upstreams = sorted(results, key=_order)
    lines = [_HEAD]
    short = {check: check.replace("pretrain_", "").removesuffix(".py") for check in _CHECKS}
    lines.append("| upstream | commit | " + " | ".join(short[check] for check in _CHECKS) + " |")
    lines.append("| --- | --- |" + " --- |" * len(_CHECKS))
    for name in upstreams:
        found = {result.what: result for result in results[name].get("static", [])}
        if found:
            cells = " | ".join(found[check].status if check in found else "-" for check in _CHECKS)
            lines.append(f"| {_title(name)} | {commits.get(name, '')} | {cells} |")
    lines.append("")
    static = [result for name in upstreams for result in results[name].get("static", [])]
    lines += _reasons([result for result in static if result.status != "ok"])
    lines += [f"* {_title(r.upstream)}, guard: {r.detail}" for r in static if r.what == "guard" and r.status == "ok"]
    lines += ["", _RUNS, "| upstream | run | result | seconds |", "| --- | --- | --- | --- |"]
    runs = [result for name in upstreams for result in results[name].get("runs", [])]
    lines += [
        f"| {_title(r.upstream)} | {r.what} | {r.status} | {f'{r.seconds:.0f}' if r.seconds else ''} |" for r in runs
    ]
    lines.append("")
    lines += _reasons([result for result in runs if result.status != "ok"])
    lines += ["", "## With what", ""]
    for text in dict.fromkeys(machines[name] for name in upstreams if name in machines):
        of = ", ".join(_title(name) for name in upstreams if machines.get(name) == text)
        lines.append(f"* {text}: {of}")
    path.write_text("\n".join(lines).rstrip() + "\n")


def _order(name: str) -> tuple[int, tuple[int, ...], str]:
    if name[0].isdigit():
        return 0, tuple(int(number) for number in name.split(".")), name
    return 1, (), "" if name == "deepspeedai" else name


def _title(name: str) -> str:
    return f"Megatron-LM {name}" if name[0].isdigit() else f"Megatron-DeepSpeed ({name})"


def _reasons(results: list[Result]) -> list[str]:
    return [f"* {_title(r.upstream)}, {r.what}, **{r.status}**: {' '.join(r.detail.split())}" for r in results]
