"""Folders of other files in the package (launch scripts, examples); in a checkout, links to the top level.

python -m megaresume.shipped      ->  the folder of the launch scripts, to copy one from
"""

from __future__ import annotations

from pathlib import Path

from megaresume.stream.errors import SetupError

_PACKAGE = Path(__file__).resolve().parent


def shipped_dir(place: str, *, holds: str, what: str, install: str) -> Path:
    """The path of a folder that ships with the package.

    Args:
        place: inside the package.
        holds: a pattern that its files match.
        what: the files, in words.
        install: what pip has to install to get them.

    Raises:
        SetupError: the installation lacks it.
    """
    folder = (_PACKAGE / place).resolve()
    if any(folder.glob(holds)):
        return folder
    raise SetupError(
        f"the {what} are missing",
        found=f"no {holds} in {folder}",
        expected=f"the {what} that the package brings",
        cause="an incomplete installation",
        action=f"pip install --force-reinstall {install}",
    )


def launch_dir() -> Path:
    """The folder of the launch scripts. Raises SetupError if the installation lacks it."""
    return shipped_dir("cluster/launch", holds="torchrun.sh", what="launch scripts", install="megaresume")


def launch_script(name: str) -> Path:
    """The path of a script in the folder, such as ``slurm/train.sbatch``. Raises SetupError as `launch_dir` does."""
    return launch_dir() / name


if __name__ == "__main__":
    print(launch_dir())
