"""Try megaresume on real upstream code and write down what came out.

    python -m tests.upstream --clones DIR [--python311 PYTHON] [--python312 PYTHON] [--only WORD ...]

See the head of docs/tried.md, which this program writes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.upstream import document, series
from tests.upstream.fingerprint import commit, fingerprint
from tests.upstream.page import PAGE
from tests.upstream.results import Result
from tests.upstream.trees import UPSTREAMS, Upstream, chosen, export, missing


def main(argv: list[str] | None = None) -> int:
    """Run what was asked for. Exit status 1 if anything failed, 2 if a clone is missing."""
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clones", type=Path, required=True, help="folder of git clones: OWNER/NAME")
    parser.add_argument("--python311", type=Path, help="a Python 3.11 with tests/upstream/requirements.txt")
    parser.add_argument("--python312", type=Path, help="the same with 3.12, for Megatron-LM from 0.17 on")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="upstreams, or kinds: static, runs")
    parser.add_argument("--scratch", type=Path, help="where trees, logs and results are kept (default: a new folder)")
    parser.add_argument("--output", type=Path, default=PAGE, help="the document (default: docs/tried.md)")
    options = parser.parse_args(argv)
    kinds = {"static", "runs"} & set(options.only) or {"static", "runs"}
    names = set(options.only) - {"static", "runs"}
    if unknown := names - {one.name for one in UPSTREAMS}:
        parser.error(f"--only {' '.join(unknown)}: expected static, runs, {', '.join(one.name for one in UPSTREAMS)}")
    wanted = chosen(names)
    clones = options.clones.absolute()
    if absent := missing(clones, wanted):
        print(absent, file=sys.stderr)
        return 2
    scratch = (options.scratch or Path(tempfile.mkdtemp(prefix="megaresume-upstream-"))).absolute()
    scratch.mkdir(parents=True, exist_ok=True)
    where = series.Where(pythons=_pythons(options), cuda=_has_cuda(), scratch=scratch, corpora=corpora(scratch))
    record = Record(scratch / "results.json")
    for upstream in wanted:
        left = kinds if options.only else {kind for kind in kinds if not record.is_current(upstream.name, kind)}
        if left:
            try_one(upstream, clones, where, record, left)
        record.write(options.output)
    num_failed = sum(result.status == "failed" for result in record.everything())
    print(f"{options.output}: {num_failed} failed; logs in {scratch}")
    return 1 if num_failed else 0


def try_one(upstream: Upstream, clones: Path, where: series.Where, record: Record, kinds: set[str]) -> None:
    """Everything of some kinds on one upstream."""
    name, made_with = upstream.name, f"{fingerprint()} {commit()}"
    for folder in (where.scratch / "trees").glob(f"{name}*"):
        if folder.name in (name, f"{name}-megatron"):
            shutil.rmtree(folder)
    tree = export(clones, upstream, where.scratch / "trees")
    record.commits[name] = tree.commit
    if upstream.python in where.pythons:
        record.versions[name] = document.versions(where.pythons[upstream.python])
    for kind in sorted(kinds, reverse=True):
        tried = False
        record.results.setdefault(name, {})[kind] = []
        record.made_with.pop(f"{name} {kind}", None)
        for result in (series.static if kind == "static" else series.runs)(tree, where):
            record.add(name, kind, result)
            tried = True
        if tried:
            record.made_with[f"{name} {kind}"] = made_with
            record.save()


def _pythons(options: argparse.Namespace) -> dict[str, Path]:
    given = {"3.11": options.python311, "3.12": options.python312}
    given.setdefault(here := "{}.{}".format(*sys.version_info[:2]), None)
    given[here] = given[here] or Path(sys.executable)
    return {version: path.absolute() for version, path in given.items() if path is not None}


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def corpora(scratch: Path) -> dict[str, tuple[Path, str]]:
    """Three small corpora of Python's own texts, with weights."""
    from megaresume.cluster.demo.demo import SOURCES, write_texts

    folder = scratch / "corpora"
    for name, path in write_texts(folder / "text").items():
        if not (folder / f"{name}.idx").exists():
            command = [sys.executable, "-m", "megaresume", "prepare", str(path), "--output", str(folder / name)]
            subprocess.run(command, check=True, capture_output=True)
    return {name: (folder / name, weight) for name, (_, weight) in SOURCES.items()}


class Record:
    """Results of this run, and of earlier ones in the same scratch folder for what was not tried again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        empty: dict[str, dict[str, object]] = {"results": {}, "commits": {}, "versions": {}, "made_with": {}}
        kept = json.loads(path.read_text()) if path.exists() else empty
        self.results = {
            name: {kind: [Result(**result) for result in found] for kind, found in by_kind.items()}
            for name, by_kind in kept["results"].items()
        }
        self.commits: dict[str, str] = kept["commits"]
        self.versions: dict[str, str] = kept["versions"]
        #: upstream and kind -> fingerprint of the integration, and our commit.
        self.made_with: dict[str, str] = kept["made_with"]

    def add(self, name: str, kind: str, result: Result) -> None:
        """One more, also on the screen."""
        self.results[name][kind].append(result)
        print(f"{result.upstream:12} {result.status:8} {result.what}  {result.detail}", flush=True)

    def is_current(self, name: str, kind: str) -> bool:
        """Whether it was tried with this integration, and nothing failed."""
        found = self.results.get(name, {}).get(kind, [])
        made_with = self.made_with.get(f"{name} {kind}", "")
        return made_with.startswith(f"{fingerprint()} ") and all(result.status != "failed" for result in found)

    def everything(self) -> list[Result]:
        """All results."""
        return [result for kinds in self.results.values() for found in kinds.values() for result in found]

    def save(self) -> None:
        """Keep them."""
        results = {
            name: {kind: [asdict(result) for result in found] for kind, found in by_kind.items()}
            for name, by_kind in self.results.items()
        }
        kept = {name: getattr(self, name) for name in ("commits", "versions", "made_with")}
        self.path.write_text(json.dumps({"results": results, **kept}, indent=1))

    def write(self, output: Path) -> None:
        """The document."""
        document.write(output, self.results, self.commits, self.versions, self.made_with, self.path.parent)


if __name__ == "__main__":
    sys.exit(main())
