"""A new host is one file, one row of `TRAINERS` and one driver: each host has one, and docs/hosts.md lists them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from megaresume.hosts.attach import OWN_LOOP, TRAINERS
from megaresume.hosts.contract import HostContract

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[2] / "docs" / "hosts.md"
#: module of a row of `TRAINERS` -> driver; None: docs/hosts.md says why there is none.
DRIVERS = {
    "deepspeed.attach": "test_deepspeed.py",
    "trl": None,
    "hugging_face": "test_trainer.py",
    "accelerate": "test_accelerate.py",
    "lightning": "test_lightning.py",
    "torchtitan": "test_torchtitan.py",
    "verl": "test_verl.py",
    "verl_prompts": None,
    "verl_separate": None,
    "megatron_bridge": "test_megatron_bridge.py",
    "torchft": None,
    "torchft_local_sgd": None,
    "loop": "test_loop.py",
}
#: Megatron-LM is not attached to: its launcher installs hooks.
OTHERS = ["test_megatron.py"]


def drivers() -> dict[str, ast.ClassDef]:
    """File -> the class that is under the contract."""
    found = {}
    for path in HERE.glob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "HostContract" for base in node.bases):
                found[path.name] = node
    return found


def test_every_host_has_a_driver() -> None:
    attached = {t.module.removeprefix("megaresume.hosts.") for t in (*TRAINERS, OWN_LOOP)}
    assert attached == set(DRIVERS)
    assert sorted(drivers()) == sorted([*filter(None, DRIVERS.values()), *OTHERS])


def test_the_document_lists_them_and_what_they_cannot_do() -> None:
    rows = dict(
        re.findall(r"^\| [^|]+ \| `(test_\w+\.py)` \|(.*)\|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    )
    flags = {name for name, value in vars(HostContract).items() if value is True}
    said = {}
    for file, node in drivers().items():
        names = {
            target.id
            for statement in node.body
            if isinstance(statement, ast.Assign) and ast.unparse(statement.value) == "False"
            for target in statement.targets
            if isinstance(target, ast.Name)
        }
        said[file] = names & flags
    assert {file: set(re.findall(r"`(\w+)`", what)) for file, what in rows.items()} == said
