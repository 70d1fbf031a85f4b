"""What pyproject.toml cannot say: the index's page."""

import re
from pathlib import Path

from setuptools import setup


def description():
    """README.md for the package index, where links to files lead nowhere: their names, as in the source archive."""
    text = (Path(__file__).resolve().parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^\]]*\]\((?!\w+:)[^)]*\)\n+", "", text)  # pictures
    text = re.sub(r"\[(docs/[\w.-]+)\]\(\1\)", r"`\1`", text)
    return re.sub(r"\[([^\]]+)\]\((?!\w+:)([\w./-]+)(?:#[\w-]+)?\)", r"\1 (`\2`)", text)


setup(long_description=description(), long_description_content_type="text/markdown")
