"""Recipes: the shipped ones are valid, and every slip in one of your own is reported with its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megaresume.patching.patch import check, revert
from megaresume.patching.recipe import find_recipe, parse_recipe, recipe_dir, shipped_recipes
from megaresume.stream.errors import ConfigError, UsageError
from tests.patching.conftest import patch

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "patching.md"
OWN = next(text for text in re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL) if "name:" in text)
SCRIPT = next(text for text in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL) if "launch(" in text)


def test_the_shipped_recipes():
    recipes = shipped_recipes()
    assert [recipe.name for recipe in recipes] == sorted(path.stem for path in recipe_dir().glob("*.yaml"))
    assert len(recipes) == 7
    assert find_recipe("megatron-lm-0.18").versions == ">=0.18,<0.19"
    with pytest.raises(UsageError, match="no such recipe"):
        find_recipe("nonsense")


def test_the_example_of_the_document_works():
    own = parse_recipe(OWN, "own.yaml")
    done = patch(SCRIPT, recipes=[own])
    assert "megaresume.provider(make_data)" in done.data.decode()
    assert "more_flags=megaresume.extra_args_provider()" in done.data.decode()
    assert revert(done.data, "s.py").data == SCRIPT.encode()


def test_a_newer_version_of_the_recipe_asks_for_revert_and_apply():
    own = parse_recipe(OWN, "own.yaml")
    data = patch(SCRIPT, recipes=[own]).data
    newer = parse_recipe(OWN.replace("version: 1", "version: 2"), "own.yaml")
    found = check(data, "s.py", [newer], None)
    assert found.status == "older" and found.action == "megaresume patch --revert s.py && megaresume patch s.py"
    both = patch(SCRIPT, recipes=[newer]).data
    assert check(both, "s.py", [own], None).status == "newer"
    assert check(data, "s.py", [], None).status == "unknown recipe"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("version: 1", "version: one", ["line 2, version: not valid", "found:        one", "a valid integer"]),
        ("version: 1", "version: 0", ["line 2, version"]),
        ("version: 1 ", "# ", ["version is missing", "found:        no version"]),
        ("version: 1", "versoin: 1", ["unknown key versoin", "did you mean version?"]),
        ("parameters: 1", "parameter: 1", ["line 23", "unknown key parameter: did you mean parameters"]),
        ("    defined_in:", "    defined:", ["line 11", "unknown key defined: did you mean defined_in"]),
        ("version: 1", "version: 1\nname: x", ["line 3", "the key 'name' stands there twice"]),
        ("name: ", "name: Bad Name ", ["line 1, name", "lower-case"]),
        ("matches:", "matches: [", ["not valid YAML", "line "]),
        ("of: launch", "of: lunch", ["not described under calls", "lunch"]),
        ("wrap_argument: datasets", "wrap_argument: nothing", ["launch has no parameter nothing"]),
        ("with: megaresume.provider", "with: other.provider", ["a function that the import does not bring"]),
        ("if_absent: add_keyword", "if_absent: maybe", ["'add_keyword' or 'refuse'"]),
        ("add_import: megaresume", "drop_import: megaresume", ["edits[0]", "add_import or wrap_argument"]),
        ("parameters: 1", "parameters: [1]", ["accepts.parameters", "a list", "a valid integer"]),
        ("name: \"data\"", "name: \"(\"", ["not a regular expression"]),
        ("[model, datasets", "[model, model, datasets", ["line 10", "a parameter twice"]),
        ("    of: launch\n    with: megaresume.e", "    with: megaresume.e", ["line 24, edits[2]", "of is missing"]),
        ("imports: [ourtrainer]", "imports: ourtrainer", ["matches.imports", "        ourtrainer", "a valid list"]),
    ],
)  # fmt: skip
def test_slips_are_reported_with_the_line(old, new, words):
    assert old in OWN
    with pytest.raises(ConfigError) as caught:
        parse_recipe(OWN.replace(old, new, 1), "own.yaml")
    for word in ["own.yaml", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("text", ["", "just text", "- a\n- b\n"])
def test_what_is_no_recipe(text):
    with pytest.raises(ConfigError, match=r"recipe own\.yaml"):
        parse_recipe(text, "own.yaml")
