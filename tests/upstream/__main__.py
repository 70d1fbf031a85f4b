"""Try megaresume on real upstream code and write down what came out.

    python -m tests.upstream --clone MEGATRON-LM [--mds PATH] [--bigscience PATH] [--python312 PYTHON] [--shim-dir DIR]

See the head of docs/compatibility.md, which this program writes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tests.upstream import document, series
from tests.upstream.results import Result
from tests.upstream.trees import VERSIONS, Tree, export

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"


def main(argv: list[str] | None = None) -> int:
    """Run what was asked for. Exit status 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clone", type=Path, help="git clone of Megatron-LM, with its tags")
    parser.add_argument("--mds", type=Path, help="git clone of deepspeedai/Megatron-DeepSpeed")
    parser.add_argument("--bigscience", type=Path, help="git clone of bigscience-workshop/Megatron-DeepSpeed")
    parser.add_argument("--python312", type=Path, help="a Python 3.12 with torch, for Megatron-LM from 0.17 on")
    parser.add_argument("--shim-dir", type=Path, help="folder with cpu_cuda_shim.py and mds_shim.py; not with CUDA")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="upstreams, or kinds: static, runs")
    parser.add_argument("--scratch", type=Path, help="where trees, logs and results are kept (default: a new folder)")
    parser.add_argument("--output", type=Path, default=DOCUMENT, help="the document (default: docs/compatibility.md)")
    options = parser.parse_args(argv)
    scratch = (options.scratch or Path(tempfile.mkdtemp(prefix="megaresume-upstream-"))).absolute()
    scratch.mkdir(parents=True, exist_ok=True)
    new = Path(sys.executable) if sys.version_info >= (3, 12) else options.python312
    pythons = {"3.11": Path(sys.executable)} | ({"3.12": new.absolute()} if new else {})
    where = series.Where(pythons=pythons, shim_dir=options.shim_dir, scratch=scratch, corpora=corpora(scratch))

    record = Record(scratch / "results.json")
    kinds = {"static", "runs"} & set(options.only) or {"static", "runs"}
    names = set(options.only) - {"static", "runs"}
    for tree in trees(options, scratch / "trees", names):
        record.commits[tree.name] = tree.commit
        python = where.python_for(tree)
        if python is not None:
            record.versions[tree.name] = document.versions(python)
        if "static" in kinds:
            record.replace(tree.name, "static", series.static(tree, where))
        if "runs" in kinds:
            record.replace(tree.name, "runs", [])
            for result in series.runs(tree, where):
                record.add(tree.name, "runs", result)
        record.save()
        document.write(options.output, record.results, record.commits, record.versions)
    everything = [result for kinds in record.results.values() for found in kinds.values() for result in found]
    num_failed = sum(result.status == "failed" for result in everything)
    print(f"{options.output}: {num_failed} failed; logs in {scratch}")
    return 1 if num_failed else 0


def trees(options: argparse.Namespace, into: Path, names: set[str]) -> Iterator[Tree]:
    """Export what is to be tried, each when its turn comes."""
    wanted = [(version, options.clone, f"core_v{version}", "megatron-lm") for version in VERSIONS if options.clone]
    if options.mds:
        wanted.append(("deepspeedai", options.mds, "HEAD", "megatron-deepspeed"))
    if options.bigscience:
        wanted.append(("bigscience", options.bigscience, "HEAD", "bigscience"))
    for name, clone, ref, kind in wanted:
        if not names or name in names:
            shutil.rmtree(into / name, ignore_errors=True)
            yield export(clone, ref, into, name=name, kind=kind)


def corpora(scratch: Path) -> dict[str, tuple[Path, str]]:
    """Three small corpora of Python's own texts, with weights."""
    from megaresume.training.demo.corpus import SOURCES, write_texts

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
        kept = json.loads(path.read_text()) if path.exists() else {"results": {}, "commits": {}, "versions": {}}
        self.results = {
            name: {kind: [Result(**result) for result in found] for kind, found in by_kind.items()}
            for name, by_kind in kept["results"].items()
        }
        self.commits: dict[str, str] = kept["commits"]
        self.versions: dict[str, str] = kept["versions"]

    def replace(self, name: str, kind: str, found: list[Result]) -> None:
        """Put new results in the place of old ones."""
        self.results.setdefault(name, {})[kind] = []
        for result in found:
            self.add(name, kind, result)

    def add(self, name: str, kind: str, result: Result) -> None:
        """One more, also on the screen."""
        self.results[name][kind].append(result)
        print(f"{result.upstream:12} {result.status:8} {result.what}  {result.detail}", flush=True)

    def save(self) -> None:
        """Keep them."""
        results = {
            name: {kind: [asdict(result) for result in found] for kind, found in by_kind.items()}
            for name, by_kind in self.results.items()
        }
        kept = {"results": results, "commits": self.commits, "versions": self.versions}
        self.path.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    sys.exit(main())
