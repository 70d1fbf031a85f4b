"""Everything that can be tried on one upstream without training: run by the Python that this upstream needs.

    PYTHONPATH=TREE:REPOSITORY python probe.py KIND CORPUS-PREFIX ...

Prints one line of JSON: [[what, ok | failed | not run | refused, detail], ...].
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ORDERS = ROOT / "tests" / "hosts" / "megatron" / "guard" / "orders.py"


class NotRun(Exception):
    """It cannot be tried here, and why."""


class Refused(Exception):
    """It is not supported, and was told so."""


def detection(kind: str) -> str:
    """`find_project` says what it is."""
    from megaresume.hosts.megatron.project import find_project
    from megaresume.stream.errors import SetupError

    try:
        project = find_project()
    except SetupError as error:
        if kind == "unsupported" and error.action:
            raise Refused(error.headline) from error
        raise
    assert project.kind == kind, f"detected {project}"
    return project.version


def seams() -> str:
    """Every name that we wrap is defined in its module: from the source, nothing is imported."""
    from megaresume.hosts.megatron.project import current_project, locate
    from megaresume.hosts.megatron.seams import seams_of

    project, missing, wanted = current_project(), [], [s for s in seams_of(current_project()) if s.role != "engine"]
    for seam in wanted:
        path = locate(project.modules[seam.role])
        assert path is not None, f"no file of {project.modules[seam.role]}"
        scope: Any = ast.parse(path.read_text())
        for name in seam.name.split("."):
            scope = next((node for node in getattr(scope, "body", []) if _binds(node, name)), None)
        if scope is None and seam.required:
            missing.append(f"{project.modules[seam.role]}.{seam.name}")
    assert not missing, f"missing: {', '.join(missing)}"
    return f"{len(wanted)} names"


def _binds(node: ast.AST, name: str) -> bool:
    """Whether a statement defines the name, or imports it."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name == name
    return isinstance(node, ast.ImportFrom) and any((one.asname or one.name) == name for one in node.names)


def hooks() -> str:
    """The modules import with the hooks in, and every name is wrapped."""
    from megaresume.hosts.megatron.hooks import install
    from megaresume.hosts.megatron.project import current_project
    from megaresume.hosts.megatron.seams import check_installed

    install()
    project = current_project()
    if project.kind == "megatron-deepspeed":
        sys.path.insert(0, str(Path(__file__).parent))
        importlib.import_module("deepspeedai_shim").stub()
    if project.kind == "bigscience":
        sys.path.insert(0, str(Path(__file__).parent))
        importlib.import_module("bigscience_shim").install()
    for role in ("arguments", "checkpointing", "training", "builder"):
        if role not in project.modules:
            continue
        try:
            importlib.import_module(project.modules[role])
        except (ImportError, SyntaxError, AttributeError) as error:
            raise NotRun(f"{project.modules[role]} does not import here: {type(error).__name__}: {error}") from error
    check_installed()
    return "imported and wrapped"


#: in Megatron-LM from 0.16 on, before, and in Megatron-DeepSpeed.
_SAMPLERS = [f"megatron.{name}.data_samplers" for name in ("training.datasets", "legacy.data", "data")]


def sampler(prefixes: list[str]) -> str:
    """The sampler of this version over our dataset: the same global batches on every number of ranks."""
    from megaresume.batches.loader import StreamDataset
    from megaresume.batches.open import open_stream
    from megaresume.hosts.megatron.project import locate

    try:
        module = importlib.import_module(next(name for name in _SAMPLERS if locate(name) is not None))
    except (ImportError, SyntaxError, AttributeError) as error:
        raise NotRun(f"the samplers do not import here: {type(error).__name__}: {error}") from error
    stream = open_stream([word for prefix in prefixes for word in ("1", prefix)], seq_length=64, seed=1, split="90,5,5")
    dataset, size, total = StreamDataset(stream), 24, 240
    expected = [dataset[sample]["tokens"].tolist() for sample in range(48, total)]
    for micro, dp in ((2, 4), (1, 4), (3, 4), (2, 2), (3, 8), (24, 1)):
        orders = []
        for rank in range(dp):
            one = module.MegatronPretrainingSampler(total, 48, micro, rank, dp)
            orders.append([sample for batch in one for sample in batch])
        rounds = (total - 48) // (micro * dp)
        merged = [s for k in range(rounds) for o in orders for s in o[k * micro : (k + 1) * micro]]
        assert merged == list(range(48, total)), f"micro-batch {micro}, DP {dp}: another order"
        assert [dataset[s]["tokens"].tolist() for s in merged[:size]] == expected[:size]
    return "6 layouts"


def guard(prefixes: list[str]) -> str:
    """The real builder: recording changes nothing, and a longer run keeps the order that was recorded."""
    from megaresume.hosts.megatron.project import current_project

    if "builder" not in current_project().modules:
        raise NotRun("this project builds its datasets without BlendedMegatronDatasetBuilder: nothing is pinned")
    sys.path.insert(0, str(ORDERS.parent))
    try:
        orders = importlib.import_module("orders")
        datasets = importlib.import_module("megatron.core.datasets.gpt_dataset")
        importlib.import_module("megatron.core.datasets.helpers")
    except (ImportError, SyntaxError, AttributeError) as error:
        raise NotRun(f"the builder does not import here: {type(error).__name__}: {error}") from error
    with tempfile.TemporaryDirectory() as folder:
        # swiss-ai has a field that must be set.
        fields = {"goldfish_loss": False} if hasattr(datasets.GPTDatasetConfig, "goldfish_loss") else {}
        common = {"paths": prefixes, "weights": [0.5, 0.3, 0.2][: len(prefixes)], "seq_length": 256, "eod": 256}
        common["config"] = fields

        def build(name: str, **more: Any) -> dict[str, Any]:
            result: dict[str, Any] = orders.run(orders.Spec(**common, cache=f"{folder}/{name}", **more))
            return result

        few, many = [400, 8, 8], [4000, 8, 8]
        stock, recorded = build("stock", sizes=few, guard=False), build("recorded", sizes=few)
        assert recorded["train"] == stock["train"], "recording changed the order"
        longer = build("longer", sizes=many, guard=False)
        pinned = build("pinned", sizes=many, loaded=recorded["payload"], samples=100)
        kept = len(stock["train"]) if len(stock["train"]) < 400 else 400
        assert pinned["train"][:kept] == stock["train"][:kept], "a longer run has another order"
        changed = longer["train"][:kept] != stock["train"][:kept]
        return f"{kept} samples pinned" + (", which stock would have reshuffled" if changed else "")


def main() -> None:
    """Try everything; one failure does not keep the others from being tried."""
    kind, prefixes = sys.argv[1], sys.argv[2:]
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an import prints
    results: list[tuple[str, str, str]] = []
    tried: list[tuple[str, Callable[[], str]]] = [
        ("detection", lambda: detection(kind)),
        ("seams", seams),
        ("hooks", hooks),
        ("sampler", lambda: sampler(prefixes)),
        ("guard", lambda: guard(prefixes)),
    ]
    for name, function in tried if kind != "unsupported" else tried[:1]:
        try:
            results.append((name, "ok", function()))
        except Refused as reason:
            results.append((name, "refused", str(reason)[:300]))
        except NotRun as reason:
            results.append((name, "not run", str(reason)[:300]))
        except Exception as error:  # noqa: BLE001  it is the result
            results.append((name, "failed", f"{type(error).__name__}: {error}"[:300]))
    print(json.dumps(results), file=output, flush=True)
    os._exit(0)  # some upstreams leave threads behind that end in an abort


if __name__ == "__main__":
    main()
