"""Everything is in pyproject.toml, but for one thing: the recipes of ``patches/`` go into the package when it is built.

In a checkout, also one installed with ``pip install -e``, ``megaresume.patching.library`` finds them where they lie.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithRecipes(build_py):
    """Copies ``patches/*.yaml`` to ``megaresume/patching/recipes/`` of the build."""

    def _recipes(self):
        folder = Path(self.build_lib) / "megaresume" / "patching" / "recipes"
        return [(source, folder / source.name) for source in sorted(ROOT.glob("patches/*.yaml"))]

    def run(self):
        super().run()
        if self.editable_mode:
            return
        for source, target in self._recipes():
            self.mkpath(str(target.parent))
            self.copy_file(str(source), str(target))

    def get_outputs(self, include_bytecode=1):
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, *(str(target) for _, target in self._recipes())]


setup(cmdclass={"build_py": BuildWithRecipes})
