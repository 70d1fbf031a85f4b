"""The wording of every refusal, read from the source: what `refusals.txt` holds.

    python -m tests.errors.refusals            prints it
    python -m tests.errors.refusals --write    after a wording was changed on purpose

A refusal is a call of a class whose name ends in Error with a headline, or with one of the four fields. What is put in
when it is raised stands as ``{}``, so that a variable that is renamed changes nothing here. The last line of each tells
the file in the package and the function: a sentence that a user reports is looked up here by the words around what was
put in.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOT = Path(__file__).with_name("refusals.txt")
FIELDS = ("found", "expected", "cause", "action")


def template(node: ast.expr) -> str:
    """A text with ``{}`` for what is put in; the two sides of a condition with `` / `` between them."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(template(value) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left) + template(right)
        case ast.IfExp(body=body, orelse=orelse):
            return f"{template(body)} / {template(orelse)}"
    return "{}"


def is_refusal(node: ast.Call) -> bool:
    """Whether an error of ours is made here."""
    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
    return name.endswith("Error") and any(keyword.arg in FIELDS for keyword in node.keywords)


def calls(node: ast.AST, function: str = "the module") -> Iterator[tuple[ast.Call, str]]:
    """Every call, and the class and function that it is in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield child, function
        within = function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            within = child.name if function == "the module" else f"{function}.{child.name}"
        yield from calls(child, within)


def refusals(package: Path = ROOT / "megaresume") -> Iterator[str]:
    """A block of lines for each."""
    for path in sorted(package.rglob("*.py")):
        for node, function in calls(ast.parse(path.read_text(encoding="utf-8"))):
            if not is_refusal(node):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            given = {keyword.arg: template(keyword.value) for keyword in node.keywords}
            headline = template(node.args[0]) if node.args else given.get("headline", "{}")
            fields = [f"    {field}: {given[field]}" for field in FIELDS if field in given]
            yield "\n".join([f"{name}: {headline}", *fields, f"    in: {path.relative_to(package)}, {function}"])


def snapshot() -> str:
    """All of them, in the order of their words."""
    return "\n\n".join(block.replace("\n\n", "\n") for block in sorted(refusals())) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv:
        SNAPSHOT.write_text(snapshot(), encoding="utf-8")
    else:
        print(snapshot(), end="")
