"""data.yaml: what is read, what is normalised, and an error for each mistake."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml

from megaresume.stream.config import StreamConfig
from megaresume.stream.data_yaml import MAX_OPEN_BINS, BlendConfig, PackingConfig
from megaresume.stream.errors import ConfigError

MINIMAL: dict[str, Any] = {"seq_length": 64, "sources": {"web": {}}}

DESIGN = """
seed: 1234
seq_length: 4096
packing: {mode: best_fit, open_bins: 16, max_age: 1024, align: 1}
blend: {unit: tokens}
sources:
  web:   {path: corpora/web_text_document, weight: 0.6}
  code:  {path: corpora/code_text_document, weight: 0.3, max_epochs: 4}
  pairs: {kind: webdataset, path: "shards/pairs-{000000..000127}.tar", weight: 0.1}
"""


def test_the_example_of_the_docs() -> None:
    config = StreamConfig.from_dict(yaml.safe_load(DESIGN))
    assert config.seed == 1234 and config.seq_length == 4096
    assert config.packing == PackingConfig(mode="best_fit", open_bins=16, max_age=1024, align=1)
    assert config.blend == BlendConfig(unit="tokens")
    assert [(s.name, s.weight, s.max_epochs, s.on_exhausted) for s in config.sources] == [
        ("web", 6, None, "drop"),
        ("code", 3, 4, "drop"),
        ("pairs", 1, None, "drop"),
    ]
    assert config.sources[2].options == {"kind": "webdataset", "path": "shards/pairs-{000000..000127}.tar"}


def test_what_is_normalised_stays_as_it_is() -> None:
    config = StreamConfig.from_dict(yaml.safe_load(DESIGN))
    data = config.to_dict()
    assert StreamConfig.from_dict(data) == config
    assert StreamConfig.from_dict(data).to_dict() == data
    assert yaml.safe_load(yaml.safe_dump(data, sort_keys=False)) == data
    assert "path" not in str(data) and "kind" not in str(data)


def test_defaults() -> None:
    config = StreamConfig.from_dict(MINIMAL)
    assert config.to_dict() == {
        "seed": 1234,
        "seq_length": 64,
        "packing": {"mode": "split", "align": 1},
        "blend": {"unit": "tokens"},
        "sources": {"web": {"weight": 1}},
    }
    same = {"packing": None, "blend": None, "stages": None}
    assert StreamConfig.from_dict(MINIMAL | same) == config


def test_short_forms() -> None:
    config = StreamConfig.from_dict({"seq_length": 8, "packing": "best_fit", "sources": {"web": "corpora/web"}})
    assert config.packing == PackingConfig(mode="best_fit") and config.sources[0].options == {"path": "corpora/web"}


def test_places_and_spelling_are_no_part_of_it() -> None:
    a = StreamConfig.from_dict({"seq_length": 8, "sources": {"a": {"path": "x", "weight": 0.5}, "b": {"weight": 1}}})
    b = StreamConfig.from_dict({"seq_length": 8, "sources": {"a": {"weight": "1"}, "b": {"path": "y", "weight": 2.0}}})
    assert a == b


@pytest.mark.parametrize("entry", ["packing", "stage"])
@pytest.mark.parametrize(
    ("packing", "unused"),
    [
        ({"mode": "split", "align": 2, "open_bins": 5}, "open_bins"),
        ({"mode": "none", "max_age": 7}, "max_age"),
        ({"mode": "best_fit", "lookahead": 3}, "lookahead"),
        ({"mode": "knapsack", "min_fragment": 8}, "min_fragment"),
    ],
)
def test_a_setting_that_does_nothing_in_its_mode(entry: str, packing: dict[str, Any], unused: str) -> None:
    data = {"packing": packing} if entry == "packing" else {"stages": [{"from_samples": 8, "packing": packing}]}
    place = "packing" if entry == "packing" else r"stages\[0\].packing"
    with pytest.raises(ConfigError, match=rf"{place} has {unused}, which does nothing in mode") as error:
        StreamConfig.from_dict(MINIMAL | data)
    assert error.value.found == f"{unused}: {packing[unused]}" and f"remove {unused}" in str(error.value.action)


def test_a_packing_without_a_mode() -> None:
    """At first it is the default of these sources; in a stage, where something else was in force, it must be said."""
    images = {"photos": {"kind": "webdataset"}}
    for sources, mode in [({"web": {}}, "split"), (images, "knapsack"), ({"web": {"packing": "split"}}, "best_fit")]:
        packing = StreamConfig.from_dict({"seq_length": 8, "packing": {"align": 2}, "sources": sources}).packing
        assert packing == PackingConfig(mode=mode, align=2)
    stage = {"from_samples": 8, "packing": {"align": 2}}
    with pytest.raises(ConfigError, match=r"stages\[0\].packing.mode is missing"):
        StreamConfig.from_dict(MINIMAL | {"packing": "best_fit", "stages": [stage]})


def test_seq_length_from_a_flag() -> None:
    without = {"sources": {"web": {}}}
    assert StreamConfig.from_dict(without, seq_length=128).seq_length == 128
    assert StreamConfig.from_dict(MINIMAL, seq_length=64).seq_length == 64
    with pytest.raises(
        ConfigError, match=r"no sequence length(.|\n)*pass seq_length= \(Megatron, plan: --seq-length\)"
    ):
        StreamConfig.from_dict(without)
    with pytest.raises(ConfigError, match=r"two sequence lengths(.|\n)*128 given separately") as error:
        StreamConfig.from_dict(MINIMAL, seq_length=128)
    assert "64" in str(error.value.found) and "128" in str(error.value.found)


def _source(**options: Any) -> dict[str, Any]:
    return {"sources": {"web": options}}


BAD: dict[str, tuple[Any, str, str]] = {
    "no mapping": (["seq_length"], "data.yaml is not a mapping", "list"),
    "empty file": (None, "data.yaml is not a mapping", "None"),
    "unknown key": ({"seq_lenght": 3}, "unknown key 'seq_lenght' in data.yaml", "seq_lenght"),
    "unknown key of packing": ({"packing": {"open_bin": 3}}, "unknown key 'open_bin' in packing", "open_bin"),
    "unknown key of blend": ({"blend": {"units": "tokens"}}, "unknown key 'units' in blend", "units"),
    "key that is no text": ({3: 4}, "unknown key '3' in data.yaml", "3"),
    "stages, empty": ({"stages": [{}]}, "stages[0] does not say when it begins", "nothing"),
    "stages, a number": ({"stages": 5}, "stages is not a list", "int: 5"),
    "packing: false": ({"packing": False}, "packing is not a mapping", "bool: False"),
    "blend, a list": ({"blend": []}, "blend is not a mapping", "list: []"),
    "seed, a text": ({"seed": "1"}, "bad value of seed", "'1'"),
    "seed, a fraction": ({"seed": 1.0}, "bad value of seed", "1.0"),
    "seed, a truth": ({"seed": True}, "bad value of seed", "True"),
    "seed, none": ({"seed": None}, "bad value of seed", "None"),
    "seed, too large": ({"seed": 2**64}, "bad value of seed", str(2**64)),
    "seq_length zero": ({"seq_length": 0}, "bad value of seq_length", "0"),
    "seq_length negative": ({"seq_length": -5}, "bad value of seq_length", "-5"),
    "seq_length, a text": ({"seq_length": "4k"}, "bad value of seq_length", "'4k'"),
    "seq_length too large": ({"seq_length": 2**31}, "bad value of seq_length", str(2**31)),
    "packing, a list": ({"packing": [1]}, "packing is not a mapping", "list"),
    "mode": ({"packing": {"mode": "bestfit"}}, "bad value of packing.mode", "'bestfit'"),
    "mode, short": ({"packing": "first_fit"}, "bad value of packing.mode", "'first_fit'"),
    "mode, nothing": ({"packing": {"mode": None}}, "bad value of packing.mode", "None"),
    "open_bins zero": ({"packing": {"mode": "best_fit", "open_bins": 0}}, "bad value of packing.open_bins", "0"),
    "open_bins": (
        {"packing": {"mode": "best_fit", "open_bins": MAX_OPEN_BINS + 1}},
        "bad value of packing.open_bins",
        str(MAX_OPEN_BINS + 1),
    ),
    "max_age": ({"packing": {"mode": "best_fit", "max_age": 0}}, "bad value of packing.max_age", "0"),
    "align": ({"packing": {"align": 0}}, "bad value of packing.align", "0"),
    "align that does not divide": ({"packing": {"align": 24}}, "not a multiple of packing.align", "seq_length 64"),
    "blend, a text": ({"blend": "tokens"}, "blend is not a mapping", "str"),
    "unit": ({"blend": {"unit": "bytes"}}, "bad value of blend.unit", "'bytes'"),
    "no sources": ({"sources": None}, "the blend is empty", "no source"),
    "no source": ({"sources": {}}, "the blend is empty", "no source"),
    "sources, a list": ({"sources": ["web"]}, "sources is not a mapping", "list"),
    "a source that is a number": ({"sources": {"web": 3}}, "sources.web is not a mapping", "int"),
    "a name that is a number": ({"sources": {1: {}}}, "bad name of a source", "1"),
    "a name that is a truth": ({"sources": {True: {}}}, "bad name of a source", "True"),
    "an empty name": ({"sources": {"": {}}}, "bad name of a source", "''"),
    "a name with spaces around": ({"sources": {" web": {}}}, "bad name of a source", "' web'"),
    "a name with a line break": ({"sources": {"we\nb": {}}}, "bad name of a source", "'we\\nb'"),
    "weight": (_source(weight=-1), "bad weight of source 'web'", "-1"),
    "weight, a text": (_source(weight="much"), "bad weight of source 'web'", "'much'"),
    "weight, nothing": (_source(weight=None), "bad weight of source 'web'", "None"),
    "weights zero": (_source(weight=0), "the blend is empty", "every weight is 0"),
    "max_epochs zero": (_source(max_epochs=0), "bad value of sources.web.max_epochs", "0"),
    "max_epochs, a fraction": (_source(max_epochs=1.5), "bad value of sources.web.max_epochs", "1.5"),
    "on_exhausted": (
        _source(max_epochs=1, on_exhausted="wrap"),
        "bad value of sources.web.on_exhausted",
        "'wrap'",
    ),
    "on_exhausted without max_epochs": (
        _source(on_exhausted="stop"),
        "source 'web' has on_exhausted without max_epochs",
        "stop",
    ),
}


@pytest.mark.parametrize(("change", "headline", "found"), BAD.values(), ids=BAD.keys())
def test_mistake(change: Any, headline: str, found: str) -> None:
    with pytest.raises(ConfigError) as error:
        StreamConfig.from_dict(MINIMAL | change if isinstance(change, dict) else change)
    assert headline in error.value.headline
    assert found in str(error.value.found)
    assert error.value.expected and error.value.action


def test_a_typing_error_is_guessed() -> None:
    with pytest.raises(ConfigError) as error:
        StreamConfig.from_dict(MINIMAL | {"sorces": {}})
    assert error.value.cause == "did you mean 'sources'?"


def test_it_cannot_be_changed() -> None:
    config = StreamConfig.from_dict(MINIMAL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 5  # type: ignore[misc]


@pytest.mark.parametrize(("kind", "mode"), [("webdataset", "knapsack"), ("energon", "knapsack"), ("megatron", "split")])
def test_the_packing_of_a_blend_that_does_not_say(kind: str, mode: str) -> None:
    data = {"seq_length": 8, "sources": {"text": {}, "pairs": {"kind": kind, "weight": 0.1}}}
    config = StreamConfig.from_dict(data)
    assert config.packing.mode == mode
    assert StreamConfig.from_dict(config.to_dict()) == config
    assert StreamConfig.from_dict(data | {"packing": "best_fit"}).packing.mode == "best_fit"


def test_a_misspelt_seq_length_is_named_as_such() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'seq_len' in data\.yaml") as found:
        StreamConfig.from_dict({"seed": 1, "seq_len": 128, "sources": {"a": {"weight": 1}}})
    assert found.value.cause == "did you mean 'seq_length'?"
