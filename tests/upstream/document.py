"""The part on Megatron of docs/tried.md, from the results."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.upstream.page import write_part
from tests.upstream.results import Result
from tests.upstream.trees import UPSTREAMS

_HEAD = """\
## Megatron

Which upstreams megaresume was tried on, what was tried, and the results. To repeat it:

    make upstream CLONES=/path/to/clones [PYTHON312=python3.12] [ONLY="main runs"]

`CLONES` holds git clones as `CLONES/OWNER/NAME` (`CLONES/NVIDIA/Megatron-LM`); for a missing one the program prints the
command that fetches it. It exports the trees into a scratch folder, and touches nothing in the clones. It makes two
virtual environments: with Python 3.11, and with 3.12 for Megatron-LM from core 0.17 on. An interrupted run continues:
results in the scratch folder (`SCRATCH`) that are of the same integration and did not fail are kept. `ONLY` repeats a
part: upstreams by name, and `static` or `runs`. Upstream's training code needs CUDA; without a GPU,
`tests/upstream/cpu_shim.py` lets `cuda` mean the CPU. Do not edit the checkout meanwhile: every run imports it anew.
`make test-all` fails if the integration, the patcher, the recipes or the launcher have changed since.
"""

_STATIC = """\
**ok**: tried, and it held. **refused**: not supported, and the launcher or the patcher says so before anything is
trained. **failed**: tried, and it did not hold; the reason is below the table. **not run**: this machine cannot; the
reason is below the table. **-**: the upstream has no such thing.

### Without training

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
### End to end

The project's unmodified `pretrain_gpt.py`, started by `torchrun … -m megaresume.run pretrain_gpt.py …`: 80 samples, 10
iterations with a global batch of 8 (with ramp-up: of 4 to 16), saving every 5, on a blend of three corpora. A rank is
killed with SIGKILL in the middle of step 7, and the run is resumed on another layout: DP, TP, PP, VPP and CP are data,
tensor, pipeline, virtual-pipeline and context parallelism. What every rank's loader gave to every micro-batch is logged
from outside; the ranks of one model must have read the same, and the global batches are compared, sample by sample and
in order, with the uninterrupted run; in plain guard mode that one is compared with the script running without
megaresume. `inspect` and `verify` read the directory that Megatron wrote. With ZeRO 1 to 3 the number of ranks stays:
DeepSpeed loads its partitions on no other, and universal checkpoints are not tried here. Seconds are those of a busy
machine.

Forks written before torch 2.6 run with `TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1` (ROCm, swiss-ai): they keep their
arguments in the checkpoint, which that torch does not load by default.

Without a GPU, context parallelism comes without its attention (`tests/upstream/cpu_shim.py`): the data are compared,
the losses mean nothing. The imports of both Megatron-DeepSpeeds need stand-ins on current releases, with a GPU as well:
`tests/upstream/bigscience_shim.py`, `deepspeedai_shim.py`.
"""

_CHECKS = ("detection", "seams", "hooks", "sampler", "guard", "patch gpt", "patch vlm")
_TITLES = {upstream.name: upstream.title for upstream in UPSTREAMS}


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
    path: Path,
    results: dict[str, dict[str, list[Result]]],
    commits: dict[str, str],
    machines: dict[str, str],
    made_with: dict[str, str],
    scratch: Path,
) -> None:
    """Write the document.

    Args:
        path: of the document.
        results: by upstream, and by kind: static, runs.
        commits: of the upstreams.
        machines: Python and packages, by upstream.
        made_with: fingerprint of the integration, and our commit, by upstream and kind.
        scratch: the folder that messages name; SCRATCH in the document.
    """
    upstreams = [name for name in _TITLES if name in results]
    lines = [_HEAD, *_made_with(made_with), "", _STATIC]
    lines.append("| upstream | commit | " + " | ".join(_CHECKS) + " |")
    lines.append("| --- | --- |" + " --- |" * len(_CHECKS))
    for name in upstreams:
        found = {result.what: result for result in results[name].get("static", [])}
        if found:
            cells = " | ".join(found[check].status if check in found else "-" for check in _CHECKS)
            lines.append(f"| {_TITLES[name]} | {commits.get(name, '')} | {cells} |")
    static = [result for name in upstreams for result in results[name].get("static", [])]
    lines += ["", *_reasons([result for result in static if result.status != "ok"])]
    lines += ["", _RUNS, "| upstream | run | result | seconds |", "| --- | --- | --- | --- |"]
    runs = [result for name in upstreams for result in results[name].get("runs", [])]
    lines += [
        f"| {_TITLES[r.upstream]} | {r.what} | {r.status} | {f'{r.seconds:.0f}' if r.seconds else ''} |" for r in runs
    ]
    lines += ["", *_reasons([result for result in runs if result.status != "ok"]), "", "### With what", ""]
    for text in dict.fromkeys(machines[name] for name in upstreams if name in machines):
        of = ", ".join(_TITLES[name] for name in upstreams if machines.get(name) == text)
        lines.append(f"* {text}: {of}")
    write_part(path, "megatron", "\n".join(lines).rstrip().replace(str(scratch), "SCRATCH") + "\n")


def _made_with(made_with: dict[str, str]) -> list[str]:
    """The line that `fingerprints_of` reads; one for each state of the integration."""
    lines = []
    for label in dict.fromkeys(made_with.values()):
        of = [key for key, value in made_with.items() if value == label]
        everything = "everything" if len(of) == len(made_with) else ", ".join(of)
        fingerprint, commit = label.split()
        lines.append(f"Made with integration `{fingerprint}` of our commit {commit}: {everything}.")
    return lines


def fingerprints_of(text: str) -> set[str]:
    """The fingerprints of the integration that a document was made with."""
    return {line.split("`")[1] for line in text.splitlines() if line.startswith("Made with integration `")}


def _reasons(results: list[Result]) -> list[str]:
    return [f"* {_TITLES[r.upstream]}, {r.what}, **{r.status}**: {' '.join(r.detail.split())}" for r in results]
