"""docs/settings.md holds every setting, as it is declared; no document names a flag that there is not."""

from __future__ import annotations

import argparse
import re

from megaresume.hosts.megatron.arguments import add_arguments
from megaresume.session.flags import add_flags
from megaresume.training.arguments import Arguments
from tests.docs.settings_table import DOCUMENT, renewed


def test_the_tables_are_those_of_today() -> None:
    text = DOCUMENT.read_text()
    assert text == renewed(text), "run: python -m tests.docs.settings_table"


def test_documents_name_flags_that_there_are() -> None:
    megatron, training = argparse.ArgumentParser(), argparse.ArgumentParser()
    add_arguments(megatron)
    add_flags(training, Arguments)
    known = {*megatron._option_string_actions, *training._option_string_actions}
    documents = [*DOCUMENT.parent.glob("*.md"), DOCUMENT.parents[1] / "README.md"]
    named = {flag for document in documents for flag in re.findall(r"--megaresume-[a-z-]*[a-z]", document.read_text())}
    assert len(named) > 10 and named <= known, named - known
