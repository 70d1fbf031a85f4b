"""Everything that is refused: with the lines in question, and the change to make by hand."""

from __future__ import annotations

import pytest

from megaresume.hosts.megatron.patching import PatchError
from megaresume.hosts.megatron.patching.choose import Beside
from megaresume.hosts.megatron.patching.recipe import find_recipe
from megaresume.stream.errors import UsageError
from tests.hosts.megatron.patching.conftest import patch
from tests.hosts.megatron.patching.scripts import LM, NEW, UP_TO_0_17, V0_18, with_call

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


RUN = "from megatron.core.enums import ModelType\nfrom megatron.training import get_args, pretrain, print_rank_0\n"


@pytest.mark.parametrize(
    ("imports", "statements", "found"),
    [
        # FlagScale's train_gpt.py: the second import rebinds the name.
        (RUN + "from elsewhere.train import pretrain\n", "", ["line 8: from megatron", "line 9: from elsewhere"]),
        ("from elsewhere.train import pretrain\n" + RUN, "", ["line 7: from elsewhere", "line 9: from megatron"]),
        (
            "try:\n    from megatron.training import get_args, pretrain\n"
            "except ImportError:\n    from old import pretrain\n",
            "",
            ["line 8: from megatron", "line 10: from old"],
        ),
        (RUN + "if 1:\n    from elsewhere import train as pretrain\n", "", ["line 10: from elsewhere"]),
        (RUN + "from elsewhere.train import *\n", "", ["line 8", "line 9: from elsewhere.train import *"]),
        (
            "from megatron.training import get_args\nfrom megatron.training import *\nfrom other import *\n",
            "",
            ["other"],
        ),
        (RUN, "def pretrain(*a): pass", ["def pretrain(*a)"]),
        (RUN, "class pretrain: pass", ["class pretrain"]),
        (RUN, "pretrain = timed(pretrain)", ["pretrain = timed(pretrain)"]),
        (RUN, "pretrain = getattr(os, 'x', pretrain)", ["pretrain = getattr"]),
        (RUN, "def f():\n    global pretrain\n    pretrain = 3", ["pretrain = 3"]),
        (RUN, "with open('x') as pretrain: pass", ["with open"]),
        (RUN + "import megatron.training\n", "megatron.training.pretrain = 3", []),
        (RUN + "import megatron.training as t\nimport other as t\n", "t.pretrain = 3", []),
    ],
)
def test_a_name_that_is_bound_more_than_once_is_ambiguous(imports, statements, found):
    call = CALL.format("datasets_provider")
    error = refused(with_call(imports, f"{statements}\n{call}" if statements else call))
    if found:
        assert "which function pretrain is cannot be told" in error.headline
        assert "bound more than once" in error.cause and "megatron.training alone" not in error.action
    for words in found:
        assert words in str(error.found)


def test_attributes_of_a_module_that_is_rebound_or_assigned_to():
    imports = "from megatron.core.enums import ModelType\nfrom megatron.training import get_args\n"
    call = CALL.format("datasets_provider").replace("pretrain", "training.pretrain")
    good = imports + "from megatron import training\n"
    assert patch(with_call(good, call)).recipe.name == "megatron-lm-0.17"
    assert "from elsewhere" in refused(with_call(good + "from elsewhere import training\n", call)).found
    assert "training.pretrain = mine" in refused(with_call(good, f"training.pretrain = mine\n{call}")).found


def test_what_is_bound_elsewhere_under_the_same_name_does_not_matter():
    more = "\n\ndef other():\n    from elsewhere import pretrain\n    return pretrain\n"
    more += "\n\ndef third(pretrain):\n    return pretrain\n"
    script = with_call(RUN + more, CALL.format("datasets_provider"))
    assert patch(script).recipe.name == "megatron-lm-0.17"


FLAT = "from megatron import get_args, print_rank_0\nfrom megatron.core.enums import ModelType\n"
FLAT += "from megatron.training import pretrain\n"


def flat(root, head=""):
    """A Megatron whose training code is megatron/training.py."""
    (root / "megatron").mkdir()
    names = "train_valid_test_dataset_provider, model_provider, model_type, a, b, extra_args_provider"
    (root / "megatron" / "training.py").write_text(f"{head}def pretrain({names}):\n    pass\n")
    return Beside(root=root, version=None)


def test_a_recipe_of_deepspeed_needs_deepspeed(tmp_path):
    """Megatron-LM before core 0.6, bigcode's and Yuan-2.0 have the same imports and the same pretrain."""
    script = with_call(FLAT, CALL.format("datasets_provider"))
    error = refused(script)
    assert "no recipe fits" in error.headline and "Megatron-LM from core 0.8 on" in error.expected
    assert "deepspeed is imported neither by it nor by a megatron beside it" in error.found
    beside = flat(tmp_path)
    error = refused(script, beside=beside)
    assert f"deepspeed is imported neither by it nor by {tmp_path / 'megatron' / 'training.py'}" in error.found
    assert patch("import deepspeed\n" + script, beside=beside).recipe.name == "megatron-deepspeed"


def test_deepspeed_beside_the_script_is_evidence(tmp_path):
    script = with_call(FLAT, CALL.format("datasets_provider"))
    beside = flat(tmp_path, "def setup():\n    from deepspeed.runtime import engine\n\n\n")
    assert patch(script, beside=beside).recipe.name == "megatron-deepspeed"


def test_a_script_without_evidence_for_any_layout():
    script = with_call(
        "from megatron.training import pretrain\nfrom megatron.core.enums import ModelType\n",
        CALL.format("datasets_provider"),
    )
    assert "megatron-lm-0.17: it imports none of megatron.training.get_args" in refused(script).found


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("print(1)\n", "megatron-lm-0.19: it does not call pretrain of megatron.training or"),
        ("", "it does not call pretrain of megatron.training or"),
        (LM + "\n\ndef f(go):\n    go(pretrain)\n", "it calls no pretrain, but passes it on"),
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
    assert done.note is not None and "0.18.0" in done.note and "outside >=0.8,<0.18" in done.note


def test_a_megatron_that_is_too_old_is_refused(tmp_path):
    names = "train_valid_test_dataset_provider, model_provider, model_type, a, b, extra_args_provider"
    error = refused(UP_TO_0_17, beside=megatron(tmp_path, names, "0.7.0"))
    assert f"megatron 0.7.0 in {tmp_path} is older than 0.8" in error.found


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
