"""Everything that is refused: with the lines in question, and the change to make by hand."""

from __future__ import annotations

import pytest

from megaresume.patching.beside import Beside
from megaresume.patching.errors import PatchError
from megaresume.patching.library import find_recipe
from megaresume.stream.errors import UsageError
from tests.patching.conftest import patch
from tests.patching.scripts import LM, NEW, UP_TO_0_17, V0_18, with_call

CALL = "pretrain({}, model_provider, ModelType.encoder_or_decoder, forward_step)"
TWO = f"if 1:\n    {CALL.format('datasets_provider')}\nelse:\n    {CALL.format('other_provider')}"


def refused(script: str, **options) -> PatchError:
    with pytest.raises(PatchError) as caught:
        patch(script, **options)
    return caught.value


@pytest.mark.parametrize(
    ("call", "headline", "found"),
    [
        (TWO, "called 2 times", "line 31: pretrain(datasets_provider"),
        (CALL.format("None"), "cannot be told", "it is None"),
        (CALL.format("model_provider"), "cannot be told", "it needs no argument, not 1"),
        (CALL.format("make(1)"), "cannot be told", "result of make(...)"),
        (CALL.format("[datasets_provider]"), "cannot be told", "neither a function nor a name"),
        (CALL.format("lambda a, b: 1"), "cannot be told", "it needs 2 arguments (a, b), not 1"),
        ("for x in []:\n    pass\n" + CALL.format("x"), "cannot be told", "cannot be followed"),
        ("x, y = make()\n" + CALL.format("x"), "cannot be told", "cannot be followed"),
        (CALL.format("os.path"), "cannot be told", "the name path does not tell"),
        ("pretrain(*everything)", "cannot be seen", "*everything"),
        (CALL.format("datasets_provider").replace(")", ", **more)"), "cannot be seen", "**more"),
        (
            "go = partial(pretrain, 1)\n" + CALL.format("datasets_provider"),
            "cannot be told",
            "go = partial(pretrain, 1)",
        ),
        (
            "pretrain = partial(pretrain, 1)\n" + CALL.format("datasets_provider"),
            "cannot be told",
            "line 30: pretrain =",
        ),
        ("start(pretrain)\n" + CALL.format("datasets_provider"), "cannot be told", "start(pretrain)"),
        ("megaresume = 3\n" + CALL.format("datasets_provider"), "the name megaresume is taken", "megaresume = 3"),
    ],
)
def test_what_cannot_be_told_is_refused_with_its_line_and_the_change_by_hand(call, headline, found):
    error = refused(with_call(LM + "from functools import partial\n", call))
    assert headline in error.headline and found in str(error.found), str(error)
    assert "line " in str(error.found)
    assert "train_valid_test_dataset_provider=megaresume.provider(" in error.action
    assert "megaresume.run train.py" in error.action


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("print(1)\n", "it does not import megatron.training"),
        ("", "it does not import megatron.training"),
        (LM + "\n\ndef f(go):\n    go(pretrain)\n", "it calls no pretrain, but hands it on"),
        (with_call(LM, "pretrain(datasets_provider, model_provider, forward_step)"), "would be forward_step, not"),
        (with_call(LM, "pretrain(1, 2)"), "has no model_type"),
        (with_call(LM, CALL.format("1").replace(")", ", 5, 6, 7, 8)")), "8 positional arguments"),
    ],
)
def test_no_recipe_fits(script, reason):
    error = refused(script)
    assert "no recipe fits" in error.headline and reason in str(error.found), str(error)


def test_a_script_that_only_runs_another_is_sent_there():
    error = refused("import runpy\nrunpy.run_path('pretrain_hybrid.py', run_name='__main__')\n")
    assert "patch the script that this one runs (line 2: runpy.run_path('pretrain_hybrid.py'" in error.action


KEYWORDS = with_call(
    NEW,
    "args = parse_and_validate_args()\npretrain(cfg_container=make(args), train_valid_test_dataset_provider="
    "datasets_provider, model_type=ModelType.a, forward_step_func=forward_step, model_provider=model_provider)",
)


def test_several_recipes_fit_and_the_flag_chooses():
    error = refused(KEYWORDS)
    assert error.found == "megatron-lm-0.18, megatron-lm-0.19" and "--recipe megatron-lm-0.18" in error.action
    assert patch(KEYWORDS, recipes=[find_recipe("megatron-lm-0.18")]).recipe.name == "megatron-lm-0.18"


def megatron(root, signature, version="0.19.0"):
    folder = root / "megatron" / "training"
    folder.mkdir(parents=True)
    (folder / "training.py").write_text(f"def pretrain({signature}):\n    pass\n")
    (root / "megatron" / "core").mkdir()
    numbers = "".join(f"{n} = {v}\n" for n, v in zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True))
    (root / "megatron" / "core" / "package_info.py").write_text(numbers)
    return Beside(root=root, version=version)


def test_the_megatron_beside_it_decides(tmp_path):
    beside = megatron(tmp_path, "cfg_container, train_valid_test_dataset_provider, model_type, forward_step_func")
    assert patch(KEYWORDS, beside=beside).recipe.name == "megatron-lm-0.19"
    error = refused(UP_TO_0_17, beside=beside)
    assert "has train_valid_test_dataset_provider as parameter 2, the recipe expects it as parameter 1" in error.found
    assert refused(V0_18, beside=beside)


def test_a_version_outside_the_range_with_the_right_parameters_is_only_noted(tmp_path):
    names = "train_valid_test_dataset_provider, model_provider, model_type, a, b, extra_args_provider"
    done = patch(UP_TO_0_17, beside=megatron(tmp_path, names, "0.18.0"))
    assert "0.18.0" in done.notes[0] and "outside >=0.8,<0.18" in done.notes[0]


def test_changed_by_hand():
    script = UP_TO_0_17.replace("import os\n", "import os\nimport megaresume\n").replace(
        "        datasets_provider,", "        megaresume.provider(datasets_provider),"
    )
    assert "uses megaresume already" in refused(script).headline


@pytest.mark.parametrize(
    ("data", "headline"),
    [
        (b"x = (\n", "syntax error in line"),
        (b"ok = 1\ndef f(:\n  pass\n", "syntax error in line 2"),
        (b"\x7fELF\x00\x01\xff\xfe", "not a Python script"),
        ("# café\n".encode("latin-1"), "not a Python script"),
        (b"# -*- coding: nonsense -*-\n", "not a Python script"),
    ],
)
def test_not_python(data, headline):
    with pytest.raises(UsageError, match=headline):
        patch(data)


def test_lone_carriage_returns_are_refused():
    assert "without changing other bytes" in refused("a = 1\rb = 2\r").headline
