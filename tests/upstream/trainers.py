"""Try megaresume under every trainer but Megatron's, on the real packages, and write docs/tried.md.

    python -m tests.upstream.trainers [--only NAME ...]

It runs the tests of the hosts, those of `make test-all` too, in the environment that it is started in. torchtitan,
VeRL, LLaMA-Factory, ms-swift, Axolotl and Sentence Transformers get environments of their own, which their tests make;
Megatron-Bridge's is that of MEGARESUME_BRIDGE_PYTHON.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.upstream.fingerprint import ROOT
from tests.upstream.page import PAGE, read_part, write_part

HEAD = """\
## Trainers

What was tried under every trainer but [Megatron](#megatron), on the real packages, on CPUs with gloo,
and the results. To repeat it, in half an hour:

    make trainers

Every row is a test, or one test with several parameters. Kills are SIGKILL. After a resume, the test's own recorder is
compared with an undisturbed run, item by item and in order.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A trainer and the tests of it."""

    title: str
    page: str
    packages: tuple[str, ...]
    #: below tests/hosts.
    tests: tuple[str, ...]


HOSTS = {
    "torch": Host(
        title="A plain torch loop",
        page="torch.md",
        packages=("torch",),
        tests=("torch/test_loop.py", "contract/test_loop.py"),
    ),
    "trainer": Host(
        title="Hugging Face's Trainer",
        page="hugging-face.md",
        packages=("transformers", "accelerate", "deepspeed"),
        tests=(
            *(f"hugging_face/test_{name}.py" for name in ("trainer", "trainer_data", "backends")),
            "contract/test_trainer.py",
        ),
    ),
    "trl": Host(
        title="TRL's SFTTrainer",
        page="hugging-face.md",
        packages=("trl", "transformers"),
        tests=("hugging_face/test_trl.py",),
    ),
    "async_grpo": Host(
        title="TRL's AsyncGRPOTrainer",
        page="rl.md#trls-asynchronous-grpo",
        packages=("trl", "transformers"),
        tests=("trl",),
    ),
    "llamafactory": Host(
        title="LLaMA-Factory, by the launcher",
        page="hugging-face.md#llama-factory-ms-swift-axolotl",
        packages=("llamafactory", "transformers", "accelerate"),
        tests=("hugging_face/frameworks/test_llama_factory.py",),
    ),
    "swift": Host(
        title="ms-swift, by the launcher",
        page="hugging-face.md#llama-factory-ms-swift-axolotl",
        packages=("ms-swift", "transformers", "accelerate"),
        tests=("hugging_face/frameworks/test_swift.py",),
    ),
    "axolotl": Host(
        title="Axolotl, by the launcher",
        page="hugging-face.md#llama-factory-ms-swift-axolotl",
        packages=("axolotl", "transformers", "accelerate"),
        tests=("hugging_face/frameworks/test_axolotl.py",),
    ),
    "sentence_transformers": Host(
        title="Sentence Transformers, by the launcher",
        page="hugging-face.md#sentence-transformers",
        packages=("sentence-transformers", "transformers", "accelerate"),
        tests=("hugging_face/frameworks/test_sentence_transformers.py",),
    ),
    "accelerate": Host(
        title="A loop with Accelerate",
        page="accelerate.md",
        packages=("accelerate",),
        tests=(
            "hugging_face/test_accelerator.py",
            "hugging_face/test_accelerator_backends.py",
            "contract/test_accelerate.py",
        ),
    ),
    "lightning": Host(
        title="Lightning",
        page="lightning.md",
        packages=("lightning",),
        tests=("lightning/test_lightning.py", "lightning/test_strategies.py", "contract/test_lightning.py"),
    ),
    "torchtitan": Host(
        title="torchtitan",
        page="torchtitan.md",
        packages=("torchtitan",),
        tests=("torchtitan", "contract/test_torchtitan.py"),
    ),
    "megatron-bridge": Host(
        title="Megatron-Bridge",
        page="megatron-bridge.md",
        packages=("megatron-bridge", "megatron-core", "torch"),
        tests=("megatron_bridge", "contract/test_megatron_bridge.py"),
    ),
    "verl": Host(title="VeRL's trainers", page="verl.md", packages=("verl",), tests=("verl", "contract/test_verl.py")),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for. Exit status 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.upstream.trainers")
    parser.add_argument("--only", nargs="+", choices=list(HOSTS), metavar="NAME", help=", ".join(HOSTS))
    parser.add_argument("--output", type=Path, default=PAGE, help="the document (default: docs/tried.md)")
    options = parser.parse_args(argv)
    sections = dict(_sections(options.output)) if options.only else {}
    num_failed = 0
    for name in options.only or HOSTS:
        host = HOSTS[name]
        report = _run(host)
        num_failed += len(report.findall(".//failure")) + len(report.findall(".//error"))
        sections[host.title] = _section(host, report)
        print(f"{host.title}: {num_failed} failed so far", flush=True)
    texts = [sections[host.title] for host in HOSTS.values() if host.title in sections]
    write_part(options.output, "trainers", "\n".join([HEAD, *texts]))
    return 1 if num_failed else 0


def _sections(document: Path) -> Iterable[tuple[str, str]]:
    for part in re.split(r"^(?=### )", read_part(document, "trainers"), flags=re.MULTILINE)[1:]:
        yield part.partition("\n")[0].removeprefix("### "), part.rstrip() + "\n"


def _run(host: Host) -> ElementTree.Element:
    """The report of pytest, as JUnit's XML."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        words = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}"]
        subprocess.run([*words, *(f"tests/hosts/{test}" for test in host.tests)], cwd=ROOT, check=False)
        return ElementTree.parse(report).getroot()


def _section(host: Host, report: ElementTree.Element) -> str:
    versions = {one.attrib["name"]: one.attrib["value"] for one in report.iter("property")}
    for package in host.packages:
        try:
            versions.setdefault(package, version(package).partition("+")[0])
        except PackageNotFoundError:
            versions.setdefault(package, "not here")
    tried = ", ".join(f"{package} {versions[package]}" for package in host.packages)
    python = ".".join(versions.get("python", platform.python_version()).split(".")[:2])
    head = f"### {host.title}\n\n[How to use it]({host.page}). Tried: {tried}, Python {python}.\n"
    rows = [f"| {what} | {came_out} |" for what, came_out in _rows(report)]
    return "\n".join([head, "| what | came out |", "| --- | --- |", *rows, ""])


def _rows(report: ElementTree.Element) -> list[tuple[str, str]]:
    """A row for every test, and for every outcome of its parameters."""
    found: dict[tuple[str, str], list[str]] = {}
    for case in report.iter("testcase"):
        name, _, parameter = case.attrib["name"].removeprefix("test_").partition("[")
        parameters = found.setdefault((name.replace("_", " "), _came_out(case)), [])
        word = parameter.removesuffix("]")
        if not re.fullmatch(r"[\w-]+", word):  # a name, and the message that is expected
            word = word.partition("-")[0]
        if word and not re.match(r"[a-z]+\d", word):  # numbered ones (options0) say nothing to a reader
            parameters.append(word.replace("_", " "))
    return [(f"{name}: {', '.join(words)}" if words else name, result) for (name, result), words in found.items()]


def _came_out(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "**failed**"
    skipped = case.find("skipped")
    return "ok" if skipped is None else f"not run: {skipped.attrib.get('message', '')}"


if __name__ == "__main__":
    sys.exit(main())
