"""The drivers of the launch scripts.

    python -m megaresume.cluster.drivers slurm|torchrun|deepspeed SETTINGS -- CONTAINER ::: TRAIN ::: FLAGS

The scripts explain the settings.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields

from megaresume.cluster.drivers import local, slurm
from megaresume.cluster.drivers.local import LocalSettings
from megaresume.cluster.drivers.slurm_job import SlurmSettings

#: The separator between the lists of words after ``--``.
_SEPARATOR = ":::"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a driver; returns the exit status of its script."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--")
    lists: list[list[str]] = [[]]
    for word in words[at + 1 :]:
        if word == _SEPARATOR and len(lists) < 3:
            lists.append([])
        else:
            lists[-1].append(word)
    parser = argparse.ArgumentParser(prog="python -m megaresume.cluster.drivers", allow_abbrev=False)
    drivers = parser.add_subparsers(dest="driver", required=True)
    for driver, settings in (("slurm", SlurmSettings), ("torchrun", LocalSettings), ("deepspeed", LocalSettings)):
        of_driver = drivers.add_parser(driver, allow_abbrev=False)
        for field in fields(settings):
            if field.name not in ("container", "train", "flags"):
                required = field.default is MISSING
                of_driver.add_argument(f"--{field.name.replace('_', '-')}", required=required, default="")
    args = vars(parser.parse_args(words[:at]))
    driver = args.pop("driver")
    container, train, flags = map(tuple, lists)
    if driver != "slurm":
        return local.run(driver, LocalSettings(**args, train=train, flags=flags))
    if not os.environ.get("SLURM_JOB_ID"):
        name = os.path.basename(args["script"])
        print(f"{name} is a Slurm batch script: sbatch {name}; without Slurm use launch/torchrun.sh", file=sys.stderr)
        return 2
    return slurm.run(SlurmSettings(**args, container=container, train=train, flags=flags))


if __name__ == "__main__":
    sys.exit(main())
