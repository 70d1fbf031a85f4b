"""``megaresume patch SCRIPT``: adapts a pretrain script, shows or checks the change, or undoes it byte for byte.

The script is replaced in one step and keeps its mode and owner; refused where that would surprise.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import shutil
import stat
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaresume.files import fsync_dir, fsync_file, leftover_name
from megaresume.hosts.megatron.patching import PatchError
from megaresume.render import write_bytes
from megaresume.stream.errors import SetupError, UsageError

if TYPE_CHECKING:
    from megaresume.hosts.megatron.patching.patch import Applied, Reverted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="the training script, such as pretrain_gpt.py")
    parser.add_argument("--diff", action="store_true", help="show what would change; write nothing")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="status 0 if patched with the current recipe, else 1")
    action.add_argument("--revert", action="store_true", help="remove the patch again, byte for byte")
    parser.add_argument("--recipe", metavar="NAME_OR_FILE", help="a shipped recipe by name, or your own YAML file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Patch, check or revert; 1 if ``--check`` finds that the script is not patched as it should be."""
    from megaresume.hosts.megatron.patching.patch import revert
    from megaresume.stream.errors import UsageError

    if args.check and args.diff:
        raise UsageError("--check and --diff exclude each other", expected="one of them", action="one command for each")
    if args.revert and args.recipe:
        raise UsageError(
            "--revert needs no --recipe",
            found=args.recipe,
            expected="the marker in the script names it",
            action="leave --recipe out",
        )
    path: Path = args.script
    old = read_script(path)
    if args.check:
        return _check(args, old)
    result = revert(old, str(path)) if args.revert else _applied(args, old)
    if args.diff:
        _show_diff(args, old, result)
        return 0
    if result.data != old:
        replace_script(path, old, result.data)
    if args.json:
        print(json.dumps(_report(path, result)))
    else:
        print(_text(path, result))
    return 0


def _recipes(args: argparse.Namespace):  # type: ignore[no-untyped-def]
    from megaresume.hosts.megatron.patching.recipe import find_recipe, shipped_recipes

    return shipped_recipes() if args.recipe is None else [find_recipe(args.recipe)]


def _applied(args: argparse.Namespace, old: bytes) -> Applied:
    from megaresume.hosts.megatron.patching.choose import find_beside
    from megaresume.hosts.megatron.patching.patch import apply

    return apply(old, str(args.script), _recipes(args), find_beside(args.script))


def _check(args: argparse.Namespace, old: bytes) -> int:
    from megaresume.hosts.megatron.patching.choose import find_beside
    from megaresume.hosts.megatron.patching.patch import check

    found = check(old, str(args.script), _recipes(args), find_beside(args.script))
    if args.json:
        print(json.dumps({"script": str(args.script), "patched": found.ok, **asdict(found)}))
    elif found.ok:
        print(f"{args.script}: patched with {found.recipe} version {found.version}")
    else:
        print(f"{args.script}: {found.status}: {found.reason}")
        if found.action:
            print(f"  next action: {found.action}")
    return 0 if found.ok else 1


def _show_diff(args: argparse.Namespace, old: bytes, result: Applied | Reverted) -> None:
    diff = _unified_diff(old, result.data, args.script.name)
    if args.json:
        print(json.dumps(_report(args.script, result) | {"diff": diff.decode("utf-8", "replace"), "written": False}))
        return
    write_bytes(diff)  # as `patch` and `git apply` read it
    if not diff:
        print(f"{args.script}: nothing to change", file=sys.stderr)


def _unified_diff(old: bytes, new: bytes, name: str) -> bytes:
    """A diff for `patch` and `git apply`, to which a lone ``\\r`` is not a line end. Empty if the files are equal."""
    before, after = (data.removesuffix(b"\n").split(b"\n") for data in (old, new))
    if not old.endswith(b"\n"):
        before[-1] += b"\n\\ No newline at end of file"
    if not new.endswith(b"\n"):
        after[-1] += b"\n\\ No newline at end of file"
    names = (b"a/" + name.encode(), b"b/" + name.encode())
    lines = difflib.diff_bytes(difflib.unified_diff, before, after, *names, lineterm=b"")
    return b"".join(line + b"\n" for line in lines)


def _report(path: Path, result: Applied | Reverted) -> dict[str, Any]:
    from megaresume.hosts.megatron.patching.patch import Applied

    if isinstance(result, Applied):
        return {
            "script": str(path),
            "action": "apply",
            "recipe": result.recipe.name,
            "version": result.recipe.version,
            "already": result.already,
            "written": not result.already,
            "changes": [{"line": line, "text": text} for line, text in result.changes],
            "note": result.note,
            "run": result.recipe.run.format(script=path),
        }
    return {
        "script": str(path),
        "action": "revert",
        "recipe": result.marker.recipe,
        "version": result.marker.version,
        "exact": result.exact,
        "written": True,
    }


def _text(path: Path, result: Applied | Reverted) -> str:
    from megaresume.hosts.megatron.patching.patch import Applied

    if not isinstance(result, Applied):
        how = (
            "the original, byte for byte" if result.exact else "only our changes were taken out; your other edits stay"
        )
        return f"{path}: reverted {result.marker.recipe} version {result.marker.version}: {how}"
    recipe = result.recipe
    if result.already:
        return f"{path}: patched already with {recipe.name} version {recipe.version}; nothing changed"
    upstream = " ".join(filter(None, (recipe.upstream, recipe.versions)))
    lines = [f"{path}: patched with {recipe.name} version {recipe.version} ({upstream})"]
    lines += [f"  line {line:>5}  {text}" for line, text in result.changes]
    lines += [f"  note: {result.note}"] if result.note else []
    lines += [
        "next:",
        f"  {recipe.run.format(script=path)}",
        "      trains on its own datasets, with their order recorded and pinned;",
        "      add --megaresume-data data.yaml to train on a stream instead",
        f"  megaresume patch --revert {path}",
        "      removes the patch again, byte for byte",
    ]
    return "\n".join(lines)


#: Larger than any training script: a larger file was given by mistake.
MAX_BYTES = 16 << 20


def read_script(path: Path) -> bytes:
    """The bytes of a script. Raises UsageError if it cannot be one."""
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_BYTES:
            kind = "a directory" if path.is_dir() else f"no plain file, or {info.st_size:,} bytes"
            expected = f"a Python file of at most {MAX_BYTES:,} bytes, as pretrain_gpt.py"
            raise UsageError(
                "not a script", found=f"{path} is {kind}", expected=expected, action="name the training script"
            )
        return path.read_bytes()
    except FileNotFoundError as error:
        raise UsageError(
            "no such script", found=str(path), expected="a Python file, as pretrain_gpt.py", action="check the path"
        ) from error
    except OSError as error:
        raise UsageError.unreadable(
            "the script", error, "a Python script", at=path, action="check the path and its permissions"
        ) from error


def replace_script(path: Path, old: bytes, new: bytes) -> None:
    """Replace a script: temporary file, fsync, rename. Mode, owner and extended attributes are kept.

    Args:
        path: the script.
        old: the content that ``new`` was made from; if the file has changed since, it is left alone.
        new: the new content.

    Raises:
        PatchError: a symbolic or hard link, read-only, of another owner, or changed meanwhile. Nothing is written.
        SetupError: the write failed; the old content is still there.
    """
    info = os.lstat(path)
    _refuse_special_files(path, info)
    temporary = path.with_name(leftover_name(path.name))
    try:
        shutil.copy2(path, temporary)
        with contextlib.suppress(PermissionError):  # another of this user's groups: becomes the default one
            os.chown(temporary, info.st_uid, info.st_gid)
        with temporary.open("r+b") as file:
            file.truncate()
            file.write(new)
            file.flush()
            fsync_file(file.fileno())
        if path.read_bytes() != old:
            raise PatchError(
                f"{path} was changed while it was being patched",
                found="other content than was read",
                expected="nobody else to write it",
                action="run the command again",
            )
        os.replace(temporary, path)
        fsync_dir(path.parent)
    except OSError as error:
        raise SetupError(
            f"cannot write {path}",
            found=f"{error.strerror or error}; the script is unchanged",
            expected=f"a folder that this user may write, with space for {len(new):,} bytes",
            action="patch a copy of the script in such a folder",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _refuse_special_files(path: Path, info: os.stat_result) -> None:
    refusal: tuple[str, str, str] | None = None
    if stat.S_ISLNK(info.st_mode):
        refusal = "is a symbolic link", f"a link to {path.resolve()}", f"megaresume patch {path.resolve()}"
    elif info.st_nlink > 1:
        action = f"cp {path} {path}.copy && mv {path}.copy {path}, and patch it then"
        refusal = f"has {info.st_nlink} names (hard links)", "one file under several names", action
    elif not info.st_mode & 0o222 or not os.access(path, os.W_OK):
        # Check the mode too: root can write to any file, but the mode is still meant as a warning.
        refusal = "is read-only", f"mode {stat.filemode(info.st_mode)}", f"chmod u+w {path}"
    elif info.st_uid != os.geteuid() != 0:
        found = f"user {info.st_uid}; replacing it would make it user {os.geteuid()}'s"
        refusal = "belongs to another user", found, f"let its owner patch it, or patch a copy: cp {path} my_{path.name}"
    if refusal is not None:
        what, found, action = refusal
        expected = "a plain file of this user's own, with one name, that may be written"
        raise PatchError(f"{path} {what}", found=found, expected=expected, action=action)
