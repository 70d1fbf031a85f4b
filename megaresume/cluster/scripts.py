"""Where the launch scripts are: ``launch/`` of a source checkout, or the folder of an installed package.

python -m megaresume.cluster.scripts      ->  the folder, to copy a script from
"""

from __future__ import annotations

from pathlib import Path

from megaresume.shipped import shipped_dir


def launch_dir() -> Path:
    """The folder of the launch scripts. Raises SetupError if the installation has lost it."""
    return shipped_dir("cluster/launch", holds="torchrun.sh", what="launch scripts", install="megaresume")


def launch_script(name: str) -> Path:
    """A script by its place in the folder, such as ``slurm/train.sbatch``. Raises SetupError as `launch_dir` does."""
    return launch_dir() / name


if __name__ == "__main__":
    print(launch_dir())
