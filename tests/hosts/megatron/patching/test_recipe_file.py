"""Recipes: the shipped ones are valid, and every slip in one of your own is reported with its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megaresume.hosts.megatron.patching.patch import check, revert
from megaresume.hosts.megatron.patching.recipe import find_recipe, read_recipe, recipe_dir, shipped_recipes
from megaresume.stream.errors import ConfigError, UsageError
from tests.hosts.megatron.patching.conftest import patch

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "megatron-launcher.md"
OWN = next(text for text in re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL) if "name:" in text)
SCRIPT = next(text for text in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL) if "launch(" in text)


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """Read the text of a recipe, as own.yaml."""
    monkeypatch.chdir(tmp_path)

    def read(text):
        Path("own.yaml").write_text(text)
        return read_recipe(Path("own.yaml"))

    return read


def test_the_shipped_recipes():
    recipes = shipped_recipes()
    assert [recipe.name for recipe in recipes] == sorted(path.stem for path in recipe_dir().glob("*.yaml"))
    assert len(recipes) == 7
    assert find_recipe("megatron-lm-0.18").versions == ">=0.18,<0.19"
    with pytest.raises(UsageError, match="no such recipe"):
        find_recipe("nonsense")


def test_the_example_of_the_document_works(parse):
    own = parse(OWN)
    done = patch(SCRIPT, recipes=[own])
    assert "megaresume.provider(make_data)" in done.data.decode()
    assert "more_flags=megaresume.extra_args_provider()" in done.data.decode()
    assert revert(done.data, "s.py").data == SCRIPT.encode()


def test_a_newer_version_of_the_recipe_asks_for_revert_and_apply(parse):
    own = parse(OWN)
    data = patch(SCRIPT, recipes=[own]).data
    newer = parse(OWN.replace("version: 1", "version: 2"))
    found = check(data, "s.py", [newer], None)
    assert found.status == "older" and found.action == "megaresume patch --revert s.py && megaresume patch s.py"
    both = patch(SCRIPT, recipes=[newer]).data
    assert check(both, "s.py", [own], None).status == "newer"
    assert check(data, "s.py", [], None).status == "unknown recipe"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("version: 1", "version: one", ["line 2: bad value of version", "found:        'one'", "an integer from 1"]),
        ("version: 1", "version: 0", ["line 2: bad value of version"]),
        ("version: 1 ", "# ", ["version is missing"]),
        ("version: 1", "versoin: 1", ["line 2: unknown key 'versoin'", "did you mean 'version'?"]),
        ("named:", "name:", ["line 16: unknown key 'name' in provider", "did you mean 'named'?"]),
        ("    defined_in:", "    defined:", ["line 10", "unknown key 'defined'", "did you mean 'defined_in'?"]),
        ("version: 1", "version: 1\nname: x", ["line 3", "the key 'name' occurs twice"]),
        ("name: ", "name: Bad Name ", ["line 1: bad value of name", "lower-case"]),
        ("matches:", "matches: [", ["is not YAML", "line "]),
        ("of: launch", "of: lunch", ["line 16: provider.of is not described under calls", "lunch"]),
        ("parameter: datasets", "parameter: nothing", ["line 16: launch has no parameter nothing"]),
        ("flags: {", "flags: {if_absent: refuse, ", ["line 17: unknown key 'if_absent' in flags"]),
        ("named: \"data\"", "named: [1]", ["line 16: bad value of provider.named", "a text"]),
        ("named: \"data\"", "named: \"(\"", ["line 16", "not a regular expression"]),
        ("[model, datasets", "[model, model, datasets", ["line 9", "each once"]),
        ("[model, datasets", "[a b, datasets", ["line 9", "Python names"]),
        ("flags: {of: launch, ", "flags: {", ["line 17: flags.of is missing"]),
        ("imports_any_of: [ourtrainer]", "imports_any_of: ourtrainer", ["matches.imports_any_of", "a list"]),
    ],
)  # fmt: skip
def test_slips_are_reported_with_the_line(parse, old, new, words):
    assert old in OWN
    with pytest.raises(ConfigError) as caught:
        parse(OWN.replace(old, new, 1))
    for word in ["own.yaml", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("text", ["", "just text", "- a\n- b\n"])
def test_what_is_no_recipe(parse, text):
    with pytest.raises(ConfigError, match=r"own\.yaml is not a recipe"):
        parse(text)
