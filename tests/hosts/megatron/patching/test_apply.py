"""What a patch does to a script, in every shape, and what it leaves alone."""

from __future__ import annotations

import ast

import pytest

from megaresume.hosts.megatron.patching.patch import check, revert
from tests.hosts.megatron.patching.conftest import RECIPES, patch
from tests.hosts.megatron.patching.scripts import (
    DEEPSPEED,
    LM,
    MINDSPEED,
    NEW,
    SHAPES,
    UP_TO_0_17,
    V0_18,
    V0_19,
    with_call,
)

SHAPE = "pretrain({}, model_provider, ModelType.encoder_or_decoder, forward_step)"


def lines(data: bytes) -> list[str]:
    return data.decode().split("\n")


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_finds_its_recipe_and_changes_its_lines_only(name):
    script, expected = SHAPES[name]
    done = patch(script)
    assert done.recipe.name == name
    old, new = lines(script.encode()), lines(done.data)
    ours = [line for line in new if "megaresume" in line or line in expected]
    assert [line for line in new if line in expected] == list(expected)
    # Without our lines, and those of the original that they replace, the two are the same.
    assert [line for line in new if line not in ours] == [line for line in old if line in new and line not in expected]
    ast.parse(done.data)


@pytest.mark.parametrize("name", SHAPES)
def test_apply_check_again_revert(name):
    script = SHAPES[name][0].encode()
    done = patch(script)
    assert check(done.data, "train.py", RECIPES, None).status == "patched"
    again = patch(done.data)
    assert again.already and again.data == done.data
    back = revert(done.data, "train.py")
    assert back.data == script and back.exact
    assert (back.marker.recipe, back.marker.version) == (name, done.recipe.version)


@pytest.mark.parametrize("name", SHAPES)
def test_the_changes_are_reported_with_their_lines(name):
    done = patch(SHAPES[name][0])
    text = lines(done.data)
    ours = [i for i, line in enumerate(text, 1) if "megaresume" in line and not line.startswith("# megaresume-patch")]
    assert [line for line, _ in done.changes] == ours
    for line, shown in done.changes:
        assert shown == text[line - 1].strip()


def test_the_patched_script_runs_and_gives_the_wrapped_functions_to_pretrain():
    done = patch(with_call(LM, SHAPE.format("datasets_provider")))
    program = done.data.decode().replace("import megaresume\n", "").replace(LM, "").replace("__name__", "'__main__'")
    seen = []

    class Ours:
        provider = staticmethod(lambda base: ("provider", base.__name__))
        extra_args_provider = staticmethod(lambda base=None: ("flags", base))

    class ModelType:
        encoder_or_decoder = 1

    def pretrain(*arguments, **keywords):
        seen.append((arguments[0], keywords))

    names = {"megaresume": Ours, "pretrain": pretrain, "ModelType": ModelType}
    exec(compile(program, "train.py", "exec"), names)
    assert seen == [(("provider", "datasets_provider"), {"extra_args_provider": ("flags", None)})]


def imported_after(script: str) -> str:
    """The line before the marker."""
    text = lines(patch(script).data)
    first = next(i for i, line in enumerate(text) if line.startswith("# megaresume-patch"))
    return text[first - 1]


def test_the_import_comes_before_megatron_and_after_an_adaptor():
    assert imported_after(UP_TO_0_17) == "import os"
    assert imported_after(MINDSPEED) == "from mindspeed_llm import megatron_adaptor"
    adapted = UP_TO_0_17.replace("import os\n", "import os\n\nimport mindspeed.megatron_adaptor  # first\n")
    assert imported_after(adapted) == "import mindspeed.megatron_adaptor  # first"
    late = UP_TO_0_17.replace("import os\n", "import megatron.core\nfrom mindspeed import megatron_adaptor\n")
    assert imported_after(late) == "from mindspeed import megatron_adaptor"


def test_the_import_comes_after_docstring_and_future_where_megatron_is_imported_inside_a_function():
    body = "\n".join("    " + line if line else "" for line in LM.splitlines())
    script = (
        '#!/usr/bin/env python\n"""Doc."""\n\nfrom __future__ import annotations\n\nX = 1\n\n\n'
        f"def provider(n):\n    return n\n\n\ndef main():\n{body}\n    "
        "pretrain(provider, provider, ModelType.a, provider)\n\n\nmain()\n"
    )
    text = lines(patch(script).data)
    assert text.index("from __future__ import annotations") < text.index("import megaresume") < text.index("X = 1")


def test_an_import_that_is_there_is_used():
    done = patch(UP_TO_0_17.replace("import os\n", "import os\nimport megaresume\n"))
    assert done.data.count(b"import megaresume") == 1 and len(done.changes) == 2
    assert revert(done.data, "train.py").exact


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (SHAPE.format("lambda n: None"), "megaresume.provider(lambda n: None)"),
        (SHAPE.format("(datasets_provider)"), "megaresume.provider((datasets_provider))"),
        (SHAPE.format("partial(other, 3)"), "megaresume.provider(partial(other, 3))"),
        (SHAPE.format("partial(other, kind=3)"), "megaresume.provider(partial(other, kind=3))"),
        (SHAPE.format("bound"), "megaresume.provider(bound)"),
        (SHAPE.format("timed(datasets_provider)"), "megaresume.provider(timed(datasets_provider))"),
        (f"again = datasets_provider\nagain = timed(again)\n{SHAPE.format('again')}", "megaresume.provider(again)"),
        (SHAPE.format("data.valid_provider"), "megaresume.provider(data.valid_provider)"),
        (SHAPE.format("datasets_provider if 1 else bound"), "megaresume.provider(datasets_provider if 1 else bound)"),
        (SHAPE.format("own"), "megaresume.provider(own)"),
        (
            "pretrain(model_type=ModelType.x, train_valid_test_dataset_provider = datasets_provider, "
            "model_provider=model_provider, forward_step_func=forward_step)",
            "train_valid_test_dataset_provider = megaresume.provider(datasets_provider)",
        ),
        (
            "pretrain(datasets_provider, model_provider, ModelType.a, forward_step, None, add_args)",
            "forward_step, None, megaresume.extra_args_provider(add_args))",
        ),
        (
            "pretrain(datasets_provider, model_provider, ModelType.a, forward_step,)",
            "forward_step, extra_args_provider=megaresume.extra_args_provider(),)",
        ),
        (
            "pretrain(\n    datasets_provider,\n    model_provider,\n    ModelType.a,\n    forward_step,  # last\n)",
            "    forward_step,  # last\n        extra_args_provider=megaresume.extra_args_provider(),\n    )",
        ),
        (
            "pretrain(\n    datasets_provider,\n    model_provider,\n    ModelType.a,\n    forward_step  # last\n)",
            "    forward_step,\n        extra_args_provider=megaresume.extra_args_provider()  # last\n    )",
        ),
    ],
)
def test_odd_forms(call, expected):
    more = "from functools import partial\nimport data\nfrom elsewhere import data_provider as own\n"
    defs = "\n\ndef other(kind, n):\n    return kind\n\n\nbound = partial(other, 1)\n"
    script = with_call(LM + more + defs, call)
    done = patch(script)
    assert done.recipe.name == "megatron-lm-0.17" and expected in done.data.decode()
    assert revert(done.data, "train.py").data == script.encode()


@pytest.mark.parametrize(
    ("imports", "call"),
    [
        ("from megatron.training import pretrain as train, get_args", "train"),
        ("from megatron import training\nimport megatron.training", "training.pretrain"),
        ("import megatron.training", "megatron.training.pretrain"),
        ("from megatron.training import *", "pretrain"),
        ("from megatron.training.training import pretrain", "pretrain"),
        (
            "try:\n    from megatron.training import pretrain\nexcept ImportError:\n"
            "    from megatron.training.training import pretrain",
            "pretrain",
        ),
        ("from typing import *\nfrom megatron.training import pretrain", "pretrain"),
    ],
)
def test_ways_to_import_pretrain(imports, call):
    script = with_call(
        imports + "\nfrom megatron.core.enums import ModelType\nfrom megatron.training import get_args\n",
        SHAPE.replace("pretrain", call, 1).format("datasets_provider"),
    )
    assert "megaresume.provider(datasets_provider)" in patch(script).data.decode()


def test_a_call_without_arguments_gets_the_keyword():
    call = "args = parse_and_validate_args( )\npretrain(make(args), datasets_provider, ModelType.a, forward_step)"
    expected = "parse_and_validate_args(extra_args_provider=megaresume.extra_args_provider() )"
    assert expected in patch(with_call(NEW, call)).data.decode()


def test_get_batch_and_everything_else_stay():
    script = V0_19.replace("def add_args", "def get_batch(it):\n    return next(it)\n\n\ndef add_args")
    assert b"def get_batch(it):\n    return next(it)\n" in patch(script).data


def test_upstreams_are_told_apart_by_content_not_by_name():
    names = [patch(script).recipe.name for script in (UP_TO_0_17, V0_18, V0_19, DEEPSPEED)]
    assert names == ["megatron-lm-0.17", "megatron-lm-0.18", "megatron-lm-0.19", "megatron-deepspeed"]
