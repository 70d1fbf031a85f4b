"""The wording of every refusal, read from the source: what `refusals.txt` holds.

    python -m tests.errors.refusals            prints it
    python -m tests.errors.refusals --write    after a wording was changed on purpose

A refusal is a call of a class whose name ends in Error with a headline, or with one of the four fields; or of one of
its class methods, which word the refusals of one shape: their words are listed as if they were written at the call.
What is put in when it is raised stands as ``{}``, so that a variable that is renamed changes nothing here. The last
line of each tells the file in the package and the function: a sentence that a user reports is looked up here by the
words around what was put in.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOT = Path(__file__).with_name("refusals.txt")
FIELDS = ("found", "expected", "cause", "action")


def shapes() -> dict[str, ast.FunctionDef]:
    """The class methods of `MegaresumeError` that word refusals, by their names."""
    tree = ast.parse((ROOT / "megaresume/stream/errors.py").read_text(encoding="utf-8"))
    (root,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "MegaresumeError")
    methods = (node for node in root.body if isinstance(node, ast.FunctionDef))
    return {
        node.name: node for node in methods if any(ast.unparse(one) == "classmethod" for one in node.decorator_list)
    }


SHAPES = shapes()


def template(node: ast.expr, given: dict[str, ast.expr] | None = None) -> str:
    """A text with ``{}`` for what is put in; the two sides of a condition with `` / `` between them.

    Args:
        node: that makes the text.
        given: in a method of `SHAPES`, the arguments of the call.
    """
    given = given or {}
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(template(value, given) for value in values)
        case ast.FormattedValue(value=ast.Name(id=name)) | ast.Name(id=name) if name in given:
            return template(given[name])
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left, given) + template(right, given)
        case ast.IfExp(test=ast.Compare(left=ast.Name(id=name), ops=[ast.Is()])) if given:
            return template(node.orelse if name in given else node.body, given)
        case ast.IfExp(body=body, orelse=orelse):
            return f"{template(body, given)} / {template(orelse, given)}"
    return "{}"


def made(node: ast.Call) -> tuple[str, dict[str, str]] | None:
    """The class of an error of ours that is made here and its fields, None if none is."""
    match node.func:
        case ast.Attribute(value=ast.Name(id=name), attr=shape) if shape in SHAPES and name.endswith("Error"):
            method = SHAPES[shape]
            names = [argument.arg for argument in method.args.args[1:]]
            given = dict(zip(names, node.args, strict=False)) | {
                word.arg: word.value for word in node.keywords if word.arg
            }
            last = method.body[-1]
            assert isinstance(last, ast.Return) and isinstance(last.value, ast.Call)
            optional = {argument.arg for argument in method.args.kwonlyargs} - set(given)
            words = {
                word.arg: template(word.value, given)
                for word in last.value.keywords
                if not (isinstance(word.value, ast.Name) and word.value.id in optional)
            }
            return name, {"headline": template(last.value.args[0], given), **words}
        case ast.Name(id=name) | ast.Attribute(attr=name) if name.endswith("Error"):
            fields = {word.arg: template(word.value) for word in node.keywords if word.arg}
            if not any(field in fields for field in FIELDS):
                return None
            return name, {"headline": template(node.args[0]) if node.args else "{}", **fields}
    return None


def calls(node: ast.AST, function: str = "the module") -> Iterator[tuple[ast.Call, str]]:
    """Every call, and the class and function that it is in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield child, function
        within = function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            within = child.name if function == "the module" else f"{function}.{child.name}"
        yield from calls(child, within)


def refusals() -> Iterator[str]:
    """A block of lines for each."""
    package = ROOT / "megaresume"
    for path in sorted(package.rglob("*.py")):
        for node, function in calls(ast.parse(path.read_text(encoding="utf-8"))):
            refusal = made(node)
            if refusal is None:
                continue
            name, given = refusal
            fields = [f"    {field}: {given[field]}" for field in FIELDS if field in given]
            yield "\n".join(
                [f"{name}: {given['headline']}", *fields, f"    in: {path.relative_to(package)}, {function}"]
            )


def snapshot() -> str:
    """All of them, in the order of their words."""
    return "\n\n".join(block.replace("\n\n", "\n") for block in sorted(refusals())) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv:
        SNAPSHOT.write_text(snapshot(), encoding="utf-8")
    else:
        print(snapshot(), end="")
