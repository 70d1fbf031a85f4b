"""Which Megatron is it: by content, over namespaces with several roots, and with a reason when it is none."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from types import SimpleNamespace

import pytest

from megaresume.hosts.megatron.project import find_project, locate, parse_version
from megaresume.stream.errors import SetupError
from tests.hosts.megatron.layouts import write_flat, write_lm, write_wheel


@pytest.fixture
def install(monkeypatch):
    """Import from exactly these roots, without the packages of this environment, imported or not."""

    def at(*roots):
        monkeypatch.setattr(sys, "path", [str(root) for root in roots])
        for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
            monkeypatch.delitem(sys.modules, name)

    return at


@pytest.fixture
def find(install):
    """Find a project on exactly these roots; nothing may be imported."""

    def at(*roots, package=None):
        install(*roots)
        before = set(sys.modules)
        try:
            return find_project(package)
        finally:
            assert not [name for name in set(sys.modules) - before if name.startswith("megatron")]

    return at


@pytest.mark.parametrize("version", [(0, 8), (0, 12), (0, 16), (0, 19)])
def test_megatron_lm(find, tmp_path, version):
    project = find(write_lm(tmp_path / "a checkout called anything", version))
    assert (project.kind, project.version) == ("megatron-lm", f"{version[0]}.{version[1]}.0")
    assert project.root == tmp_path / "a checkout called anything"
    assert project.modules["arguments"] == "megatron.training.arguments"
    assert project.modules["builder"] == "megatron.core.datasets.blended_megatron_dataset_builder"
    assert "engine" not in project.modules
    assert project.at_least(*version) and not project.at_least(version[0], version[1] + 1)


@pytest.mark.parametrize(("kind", "version"), [("megatron-deepspeed", "0.2.0"), ("bigscience", "1.1.5")])
def test_megatron_deepspeed(find, tmp_path, kind, version):
    project = find(write_flat(tmp_path, kind))
    assert (project.kind, project.version, project.root) == (kind, version, tmp_path)
    assert project.modules["training"] == "megatron.training"
    assert project.modules["engine"] == "deepspeed.runtime.engine"


def test_pre_releases_are_versions(find, tmp_path):
    project = find(write_lm(tmp_path, (0, 17), pre="rc0"))
    assert project.version == "0.17.0rc0" and project.at_least(0, 17)
    assert parse_version("unknown") == (0, 0) and parse_version("1") == (1, 0)


@pytest.mark.parametrize("wheel_first", [True, False])
def test_a_wheel_beside_a_checkout_shares_the_namespace(find, tmp_path, wheel_first):
    roots = [write_wheel(tmp_path / "wheel", (0, 13)), write_lm(tmp_path / "checkout", (0, 16))]
    project = find(*(roots if wheel_first else reversed(roots)))
    # The training code is what is wrapped: its version, not the one of a core from elsewhere.
    assert (project.kind, project.version, project.root) == ("megatron-lm", "0.16.0", tmp_path / "checkout")


def test_training_code_over_the_core_of_a_wheel(find, tmp_path):
    write_lm(tmp_path / "checkout", core=False)
    project = find(tmp_path / "checkout", write_wheel(tmp_path / "wheel", (0, 14)))
    assert project.version == "0.14.0"
    assert project.modules["builder"] == "megatron.core.datasets.blended_megatron_dataset_builder"


def test_a_regular_package_hides_the_namespace_as_it_does_for_python(find, tmp_path):
    project = find(write_lm(tmp_path / "lm"), write_flat(tmp_path / "flat"))
    assert project.kind == "megatron-deepspeed"


def test_a_fork_that_renamed_the_package(find, tmp_path, monkeypatch):
    root = write_lm(tmp_path, package="ourtron")
    with pytest.raises(SetupError, match="there is no megatron to be imported"):
        find(root)
    assert find(root, package="ourtron").modules["training"] == "ourtron.training.training"
    monkeypatch.setenv("MEGARESUME_PACKAGE", "ourtron")
    assert find(root).modules["training"] == "ourtron.training.training"


def test_only_the_wheel(find, tmp_path):
    with pytest.raises(SetupError, match=r"no megatron\.training: only megatron-core") as error:
        find(write_wheel(tmp_path))
    assert str(tmp_path / "megatron") in str(error.value)
    assert "PYTHONPATH=/path/to/Megatron-LM" in error.value.action


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("energon/__init__.py", "only megatron-energon"),
        ("neox_arguments/__init__.py", "gpt-neox is not supported"),
        ("anything.py", "not a Megatron that we know"),
        ("training/training.py", "not the training code of Megatron-LM as we know it"),
    ],
)
def test_other_owners_of_the_name(find, tmp_path, file, words):
    (tmp_path / "megatron" / file).parent.mkdir(parents=True)
    (tmp_path / "megatron" / file).write_text("")
    with pytest.raises(SetupError, match=words):
        find(tmp_path)


def test_megatron_without_deepspeed_of_old(find, tmp_path):
    with pytest.raises(SetupError, match="too old, or runs without DeepSpeed"):
        find(write_flat(tmp_path, "plain"))


def test_locate_finds_what_python_would_import(install, tmp_path, monkeypatch):
    install(write_lm(tmp_path, (0, 12)))
    # another finder may ask Python's, which wants the parents of a namespace imported
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=PathFinder.find_spec), *sys.meta_path])
    samplers = tmp_path / "megatron" / "legacy" / "data" / "data_samplers.py"  # two namespaces down
    assert locate("megatron.legacy.data.data_samplers") == samplers
    assert locate("megatron.legacy.data") is None
    assert locate("megatron.core.package_info.MAJOR") is None
