"""The hooks in a training process: which wrappers run and in which order, in children, beside other patchers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from megaresume.hosts.megatron.project import Project
from megaresume.hosts.megatron.seams import SEAMS, seams_of
from megaresume.stream.errors import SetupError
from tests.hosts.megatron.layouts import DOUBLES, HOOKED_RUN, run_python, script, write_flat, write_lm
from tests.release import release

pytestmark = pytest.mark.process

LM_SCRIPT = """
from megatron.training import pretrain

def train_valid_test_datasets_provider(num_samples, vp_stage=None):
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    return BlendedMegatronDatasetBuilder(object, num_samples, lambda: True, None).build()

if __name__ == "__main__":
    print("built", pretrain(train_valid_test_datasets_provider))
"""

FLAT_SCRIPT = LM_SCRIPT.replace("megatron.training import", "megatron.training import").replace(
    """    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    return BlendedMegatronDatasetBuilder(object, num_samples, lambda: True, None).build()
""",
    """    from deepspeed.runtime.engine import DeepSpeedEngine
    DeepSpeedEngine().load_checkpoint(None)
    DeepSpeedEngine().save_checkpoint(None)
    return num_samples
""",
)

#: The wrappers in the order of the calls. An inner name stands behind the outer one that calls it.
LM_HOOKS = [
    "arguments.around_add_data_args",
    "checks.around_validate_args",
    "checkpointing.around_load_checkpoint",
    "load_rules.around_read_metadata",
    "checkpointing.around_check_checkpoint_args",
    "iterators.around_build_data_iterators",
    "guard.build.around_builder_build",
    "checkpointing.around_save_checkpoint",
    "checkpointing.around_schedule_async_save",
]


def hooks_of(output: str) -> list[str]:
    return [line.removeprefix("hook ") for line in output.splitlines() if line.startswith("hook ")]


def launch(root: Path, text: str, *args: str, name: str = "pretrain_gpt.py", **options):
    """Run a script in the root of the checkout, with wrappers that say who they are."""
    return run_python("-c", HOOKED_RUN, script(root / name, text), *args, **options)


RELEASE = release(
    "versions between the oldest and the newest",
    "the same, the oldest and the newest",
)


@pytest.mark.parametrize("version", [(0, 8), (0, 99), *(pytest.param((0, v), marks=RELEASE) for v in (12, 16, 19))])
def test_megatron_lm(tmp_path, version):
    done = launch(write_lm(tmp_path, version), LM_SCRIPT)
    assert hooks_of(done.stdout) == LM_HOOKS, done.stderr
    assert done.stdout.endswith("built [1, 2, 3]\n") and done.returncode == 0


@pytest.mark.parametrize("kind", ["megatron-deepspeed", "bigscience"])
def test_megatron_deepspeed(tmp_path, kind):
    engine = tmp_path / "deepspeed" / "runtime" / "engine.py"
    script(
        engine,
        "class DeepSpeedEngine:\n    def save_checkpoint(self, d): pass\n    load_checkpoint = save_checkpoint\n",
    )
    for package in (engine.parent, engine.parents[1]):
        (package / "__init__.py").write_text("")
    text = FLAT_SCRIPT.replace("    DeepSpeedEngine().load", "    print('engine'); DeepSpeedEngine().load")
    root = write_flat(tmp_path, kind)
    checkpointing = root / "megatron" / "checkpointing.py"
    checkpointing.write_text(
        checkpointing.read_text().replace("model[0].save_checkpoint('save', client_state={})", "pass")
    )
    done = launch(root, text)
    without = () if kind == "megatron-deepspeed" else ("checks.around_validate_args", "load_rules.around_read_metadata")
    expected = [name for name in LM_HOOKS if not name.startswith("guard.") and name not in without]
    expected.remove("checkpointing.around_schedule_async_save")
    at = expected.index("iterators.around_build_data_iterators") + 1
    expected[at:at] = ["host.around_engine_load", "host.around_engine_save"]
    assert hooks_of(done.stdout) == expected, done.stderr


def test_a_script_that_puts_megatron_on_the_path_itself(tmp_path):
    root = write_lm(tmp_path / "checkout")
    text = f"import sys\nsys.path.insert(1, {str(root)!r})\n" + LM_SCRIPT
    done = launch(tmp_path / "elsewhere", text)
    assert hooks_of(done.stdout) == LM_HOOKS, done.stderr


def test_a_script_that_puts_a_script_of_megatron_on_the_path(tmp_path):
    """The launcher sees no import of Megatron, and is not misled by transformers, which is here as well."""
    root = write_lm(tmp_path / "checkout")
    (root / "inner.py").write_text(LM_SCRIPT.replace('if __name__ == "__main__":', "if True:"))
    done = launch(tmp_path / "elsewhere", f"import sys\nsys.path.insert(1, {str(root)!r})\nimport inner\n")
    assert hooks_of(done.stdout) == LM_HOOKS, done.stderr


def test_no_megatron_is_refused_before_the_script_starts(tmp_path):
    done = launch(tmp_path, "print('started')\nfrom megatron.training import pretrain")
    assert done.returncode == 1 and "started" not in done.stdout
    assert "megaresume: error: " in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("file", "old"),
    [
        ("checkpointing.py", "def check_checkpoint_args"),
        ("training.py", "def build_train_valid_test_data_iterators"),
        ("checkpointing.py", "import schedule_async_save"),
    ],
)
def test_a_missing_seam_is_named_before_training(tmp_path, file, old):
    root = write_lm(tmp_path)
    path = root / "megatron" / "training" / file
    name = old.split()[1]
    # The callers keep working: only the name that we know is gone.
    path.write_text(
        path.read_text()
        .replace(name, f"{name}_renamed")
        .replace("import schedule_async_save_renamed", "import schedule_async_save as schedule_async_save_renamed")
    )
    if name == "check_checkpoint_args":  # part of what makes it a Megatron-LM
        path.write_text(
            path.read_text()
            + "\nif False:\n    pass\ndef check_checkpoint_args(args): pass\ndel check_checkpoint_args\n"
        )
    done = launch(root, LM_SCRIPT)
    assert done.returncode == 1 and hooks_of(done.stdout) == []
    assert f"has no {name}, which megaresume has to wrap" in done.stderr
    assert str(path) in done.stderr and "next action" in done.stderr and "Traceback" not in done.stderr


def test_a_module_that_is_missing_is_named():
    project = Project(
        kind="megatron-lm", root=Path("/x"), version="0.16.0", modules={"arguments": "a", "training": "t"}
    )
    with pytest.raises(SetupError, match="no module with load_checkpoint"):
        seams_of(project)


ADAPTOR = """
import sys
from megatron.training import {module} as target

def {name}(*args, **kwargs):
    print("replaced")

kept = [target.{attribute}]  # not a name of its own, which would be replaced; kept, so that nothing else gets its id
for module in list(sys.modules.values()):
    for key, value in list(vars(module).items()):
        if value is kept[0]:
            setattr(module, key, {name})
"""


@pytest.mark.parametrize(
    ("module", "attribute"),
    [("checkpointing", "save_checkpoint"), ("training", "build_train_valid_test_data_iterators")],
)
def test_a_seam_that_another_patcher_replaced(tmp_path, module, attribute):
    root = write_lm(tmp_path)
    script(root / "adaptor.py", ADAPTOR.format(module=module, attribute=attribute, name="replacement"))
    done = launch(root, "import adaptor\n" + LM_SCRIPT)
    assert done.returncode == 1 and "built" not in done.stdout
    assert f"megatron.training.{module}.{attribute} was replaced by adaptor.replacement" in done.stderr
    assert "hooks.install()" in done.stderr
    again = "import adaptor\nimport megaresume.hosts.megatron as hooks\nhooks.install()\n"
    done = launch(root, again + LM_SCRIPT)
    factory = next(seam.factory.path for seam in SEAMS if seam.name == attribute)
    assert done.returncode == 0, done.stderr
    assert f"hook {factory}\nreplaced\n" in done.stdout


def test_a_by_name_import_that_another_patcher_replaced(tmp_path):
    """Only where it is used: in its home the name is still ours."""
    root = write_lm(tmp_path)
    patch = "from megatron.training import training\ntraining.save_checkpoint = lambda *args: print('theirs')\n"
    done = launch(root, patch + LM_SCRIPT)
    assert done.returncode == 1 and "megatron.training.training.save_checkpoint was replaced" in done.stderr
    again = "import megaresume.hosts.megatron as hooks\nhooks.install()\n"
    done = launch(root, patch + again + LM_SCRIPT)
    assert done.returncode == 0 and "hook checkpointing.around_save_checkpoint\ntheirs\n" in done.stdout, done.stderr


def test_mode_off_asks_for_nothing(tmp_path):
    root = write_lm(tmp_path)
    arguments = root / "megatron" / "training" / "arguments.py"
    arguments.write_text(
        arguments.read_text().replace(
            "parser.add_argument(", 'parser.add_argument("--megaresume-mode")\n    parser.add_argument('
        )
    )
    patch = "from megatron.training import training\ntraining.save_checkpoint = lambda *args: print('theirs')\n"
    done = launch(root, patch + LM_SCRIPT, "--megaresume-mode", "off")
    assert done.returncode == 0 and "theirs" in done.stdout, done.stderr


def test_in_process_restart_wraps_nothing_twice(tmp_path):
    """The same process runs pretrain again, on new arguments."""
    text = (
        LM_SCRIPT
        + """
    from megaresume.hosts.megatron import install
    install()
    pretrain(train_valid_test_datasets_provider)
"""
    )
    done = launch(write_lm(tmp_path), text)
    assert hooks_of(done.stdout) == LM_HOOKS * 2, done.stderr


CHILDREN = """
import multiprocessing, subprocess, sys

def work(queue):
    from megatron.training.training import save_checkpoint
    save_checkpoint(1, None, None, None)
    queue.put(sys.argv)

class Config:
    pass

def take(config, queue):
    queue.put(type(config).__module__)

if __name__ == "__main__":
    import megatron.training
    for method in ("spawn", "forkserver", "fork"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=work, args=(queue,))
        process.start()
        print(f"{method} {queue.get(timeout=60)[1:]}\\n", end="", flush=True)
        process.join()
        process = context.Process(target=take, args=(Config(), queue))
        process.start()
        print(f"{method} {queue.get(timeout=60)}\\n", end="", flush=True)
        process.join()
    subprocess.run([sys.executable, "-c", "from megatron.training.training import save_checkpoint as s; s(1, 2, 3, 4)"])
"""


def test_children(tmp_path):
    root = write_lm(tmp_path / "checkout")
    # The user's own sitecustomize still runs, in its turn: here it brings the doubles.
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        DOUBLES
        + "import sys\nos.write(1, b'mine %s\\n' % str(__file__ == sys.modules['sitecustomize'].__file__).encode())\n"
    )
    done = launch(root, CHILDREN, "--x", path=[tmp_path / "site", root])
    assert done.returncode == 0, done.stderr
    saved = ["hook checkpointing.around_save_checkpoint", "hook checkpointing.around_schedule_async_save"]
    said = [line for line in done.stdout.splitlines() if not line.startswith("mine")]
    for method in ("spawn", "forkserver", "fork"):
        assert said[:2] == saved, method
        kind = "__main__" if method == "fork" else "__mp_main__"
        assert said[2:4] == [f"{method} ['--x']", f"{method} {kind}"]
        del said[:4]
    assert said == saved
    assert done.stdout.count("mine True") >= 4 and "mine False" not in done.stdout


@pytest.mark.cold
def test_children_load_next_to_nothing(tmp_path):
    """A child that never imports Megatron pays for one small file."""
    show = (
        "import sys; print(*sorted(n for n in sys.modules if n.partition('.')[0] in ('megaresume', 'numpy', 'torch')))"
    )
    show += "; print(*sys.path)"
    text = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {show!r}])"
    done = launch(write_lm(tmp_path), text)
    assert done.stdout.splitlines()[0].split() == [
        "megaresume",
        "megaresume.hosts",
        "megaresume.hosts.importing",
    ]
    assert "hosts/startup" not in done.stdout


def test_the_document_shows_the_table():
    document = Path(__file__).parents[3].joinpath("docs", "megatron-launcher.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| ([\w-]+(?:, [\w-]+)*) \| (.+) \|$", document, re.MULTILINE)
    short = {"megatron-lm": "LM", "megatron-deepspeed": "DS", "bigscience": "BS"}
    expected = [(f"{seam.role}.{seam.name}", ", ".join(short[kind] for kind in seam.kinds), seam.why) for seam in SEAMS]
    assert rows == expected
    assert all(sys.intern(seam.why)[-1] not in ".!" for seam in SEAMS)
