"""Which integration a document was made with: a hash of the files that decide whether an upstream works."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

__all__ = ["ROOT", "commit", "files", "fingerprint"]

ROOT = Path(__file__).resolve().parents[2]


def files(root: Path = ROOT) -> list[Path]:
    """The integration with Megatron, the patcher with its recipes, and the launcher."""
    package = root / "megaresume"
    folders = (
        (package / "integrations" / "megatron", "*.py"),
        (package / "patching", "*.py"),
        (root / "patches", "*.yaml"),
    )
    found = [path for folder, pattern in folders for path in folder.rglob(pattern)]
    return sorted([*found, package / "run.py"])


def fingerprint(root: Path = ROOT) -> str:
    """Sixteen hexadecimal digits of SHA-256 over their names and contents."""
    digest = hashlib.sha256()
    for path in files(root):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def commit() -> str:
    """The commit of this checkout, 10 hex digits; with a plus if files of the integration differ from it."""
    paths = [str(path) for path in files()]
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return "unknown"
    clean = subprocess.run(["git", "-C", str(ROOT), "diff", "--quiet", "HEAD", "--", *paths]).returncode == 0
    return head.stdout.strip()[:10] + ("" if clean else "+")
