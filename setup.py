"""Everything is in pyproject.toml, but for ``patches/`` and ``launch/``, which go into the package when it is built.

In a checkout, also one installed with ``pip install -e``, ``megaresume.patching.library`` and
``megaresume.smoke.scripts`` find them where they lie.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
#: what is copied, from where, to where in the build.
COPIES = [
    ("*.yaml", "patches", "megaresume/patching/recipes"),
    ("**/*", "launch", "megaresume/smoke/launch"),
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


setup(cmdclass={"build_py": BuildWithCopies})
