"""Where the launch scripts are: ``launch/`` of a source checkout, or the copy inside an installed package.

python -m megaresume.smoke.scripts      ->  the folder, to copy a script from
"""

from __future__ import annotations

from pathlib import Path

from megaresume.stream.errors import SetupError

__all__ = ["launch_dir", "launch_script"]

_PACKAGE = Path(__file__).resolve().parent


def launch_dir() -> Path:
    """The folder of the launch scripts. Raises SetupError if the installation has lost it."""
    # The build copies launch/ to the first; a checkout, also one installed with -e, has only the second.
    for folder in (_PACKAGE / "launch", _PACKAGE.parent.parent / "launch"):
        if (folder / "torchrun.sh").is_file():
            return folder
    raise SetupError(
        "the launch scripts are missing",
        found=f"no torchrun.sh in {_PACKAGE / 'launch'}",
        expected="the scripts that the package brings",
        cause="an incomplete installation",
        action="pip install --force-reinstall megaresume",
    )


def launch_script(name: str) -> Path:
    """A script by its place in the folder, such as ``slurm/train.sbatch``. Raises SetupError as `launch_dir` does."""
    return launch_dir() / name


if __name__ == "__main__":
    print(launch_dir())
