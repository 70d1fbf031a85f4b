"""What pyproject.toml cannot say: copies of ``patches/`` and ``launch/`` in the package, and the index's page.

In a checkout, also one installed with ``pip install -e``, ``megaresume.patching.recipe`` and
``megaresume.cluster.scripts`` find them where they lie.
"""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
#: what is copied, from where, to where in the build.
COPIES = [
    ("*.yaml", "patches", "megaresume/patching/recipes"),
    ("**/*", "launch", "megaresume/cluster/launch"),
]


class BuildWithCopies(build_py):
    """Copies the recipes and the launch scripts."""

    def _copies(self):
        for pattern, source, target in COPIES:
            for path in sorted((ROOT / source).glob(pattern)):
                if path.is_file():
                    yield path, Path(self.build_lib) / target / path.relative_to(ROOT / source)

    def run(self):
        super().run()
        if self.editable_mode:
            return
        for source, target in self._copies():
            self.mkpath(str(target.parent))
            self.copy_file(str(source), str(target))

    def get_outputs(self, include_bytecode=1):
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, *(str(target) for _, target in self._copies())]


def description():
    """README.md for the package index, where links to files lead nowhere: their names, as in the source archive."""
    text = re.sub(r"\[(docs/[\w.-]+)\]\(\1\)", r"`\1`", (ROOT / "README.md").read_text(encoding="utf-8"))
    return re.sub(r"\[([^\]]+)\]\((?!\w+:)([\w./-]+)(?:#[\w-]+)?\)", r"\1 (`\2`)", text)


setup(
    cmdclass={"build_py": BuildWithCopies},
    long_description=description(),
    long_description_content_type="text/markdown",
)
