"""docs/settings.md holds every setting, as it is declared; no document names a flag that there is not."""

from __future__ import annotations

import argparse
import re

from megaresume.checkpoint.flags import add_flags, add_settings
from megaresume.checkpoint.settings import GROUPS
from megaresume.cluster.training.launch import Arguments
from megaresume.hosts.megatron.arguments import add_arguments
from tests.docs.settings_table import DOCUMENT, renewed


def test_the_tables_are_those_of_today() -> None:
    text = DOCUMENT.read_text()
    assert text == renewed(text), "run: python -m tests.docs.settings_table"


def test_documents_name_flags_that_there_are() -> None:
    megatron, trainer, training = (argparse.ArgumentParser() for _ in range(3))
    add_arguments(megatron)
    for group in GROUPS.values():
        add_settings(trainer, group, "trainer")
    add_flags(training, Arguments)
    known = {name for parser in (megatron, trainer, training) for name in parser._option_string_actions}
    documents = [*DOCUMENT.parent.glob("*.md"), DOCUMENT.parents[1] / "README.md"]
    named = {flag for document in documents for flag in re.findall(r"--megaresume-[a-z-]*[a-z]", document.read_text())}
    assert len(named) > 10 and named <= known, named - known
