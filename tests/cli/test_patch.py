"""``megaresume patch``: what users see, exit statuses, and the file on disk."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys

import pytest

from megaresume.hosts.megatron.patching import PatchError
from megaresume.hosts.megatron.patching.command import replace_script
from tests.cli.conftest import megaresume
from tests.hosts.megatron.patching.scripts import MINDSPEED, UP_TO_0_17, V0_19
from tests.hosts.megatron.patching.test_revert import edit


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_bytes(V0_19.replace("\n", "\r\n").encode())
    path.chmod(0o754)
    return path


def test_the_whole_way(script):
    original = script.read_bytes()
    shown = megaresume("patch", script, "--diff")
    assert shown.returncode == 0 and script.read_bytes() == original
    assert megaresume("patch", script, "--check").returncode == 1

    done = megaresume("patch", script)
    assert done.returncode == 0, done.stderr
    assert "patched with megatron-lm-0.19 version 1" in done.stdout
    assert f"torchrun --nproc-per-node GPUS {script} ARGUMENTS" in done.stdout
    assert f"megaresume patch --revert {script}" in done.stdout
    patched = script.read_bytes()
    assert patched != original and stat.S_IMODE(script.stat().st_mode) == 0o754
    assert megaresume("patch", script, "--check").returncode == 0

    again = megaresume("patch", script)
    assert again.returncode == 0 and "patched already" in again.stdout and script.read_bytes() == patched

    back = megaresume("patch", script, "--revert")
    assert back.returncode == 0 and "byte for byte" in back.stdout
    assert script.read_bytes() == original and os.listdir(script.parent) == ["train.py"]
    assert stat.S_IMODE(script.stat().st_mode) == 0o754


@pytest.mark.process
@pytest.mark.parametrize("text", [V0_19, V0_19.replace("\n", "\r\n"), UP_TO_0_17.rstrip("\n"), MINDSPEED])
def test_the_diff_is_one_that_patch_takes(tmp_path, text):
    path = tmp_path / "train.py"
    path.write_bytes(text.encode())
    command = [sys.executable, "-m", "megaresume", "patch", str(path), "--diff"]
    diff = subprocess.run(command, capture_output=True, check=True).stdout
    assert megaresume("patch", path).returncode == 0
    expected = path.read_bytes()
    path.write_bytes(text.encode())
    subprocess.run(["patch", "-p1", "--binary", "-s"], input=diff, cwd=tmp_path, check=True)
    assert path.read_bytes() == expected


def test_json(script):
    done = json.loads(megaresume("patch", script, "--json").stdout)
    assert (done["action"], done["recipe"], done["version"], done["written"]) == ("apply", "megatron-lm-0.19", 1, True)
    lines = script.read_text().splitlines()
    assert all("megaresume" in lines[change["line"] - 1] for change in done["changes"]) and len(done["changes"]) == 3
    check = json.loads(megaresume("patch", script, "--check", "--json").stdout)
    assert check["patched"] is True and check["status"] == "patched"
    diff = json.loads(megaresume("patch", script, "--revert", "--diff", "--json").stdout)
    assert diff["written"] is False and "\n-import megaresume" in diff["diff"]
    assert json.loads(megaresume("patch", script, "--revert", "--json").stdout)["exact"] is True
    check = json.loads(megaresume("patch", script, "--check", "--json").stdout)
    assert check["status"] == "unpatched" and check["action"] == f"megaresume patch {script}"


@pytest.mark.parametrize(
    ("content", "flags", "words"),
    [
        (None, (), "no such script"),
        ("", (), "is a directory"),
        ("def f(:\n", (), "syntax error in line 1"),
        (V0_19, ("--check", "--diff"), "exclude each other"),
        (V0_19, ("--check", "--revert"), "not allowed with"),
        (V0_19, ("--recipe", "nonsense"), "no such recipe"),
        (V0_19, ("--revert", "--recipe", "megatron-lm-0.19"), "--revert needs no --recipe"),
    ],
)
def test_bad_usage_is_status_2(tmp_path, content, flags, words):
    path = tmp_path / "train.py"
    if content == "":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    done = megaresume("patch", path, *flags)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("flags", [(), ("--revert",), ("--diff",)])
def test_what_cannot_be_done_is_status_1_and_changes_nothing(tmp_path, flags):
    path = tmp_path / "train.py"
    path.write_text("print(1)\n")
    done = megaresume("patch", path, *flags)
    assert done.returncode == 1 and "next action" in done.stderr and "Traceback" not in done.stderr
    assert path.read_text() == "print(1)\n"


def test_an_edited_patch_is_named_by_check(script):
    megaresume("patch", script)
    script.write_bytes(edit(script.read_bytes(), b".provider(datasets_provider)", b".provider(other)"))
    done = megaresume("patch", script, "--check")
    assert done.returncode == 1 and "edited" in done.stdout and "megaresume.provider(other)" in done.stdout
    assert megaresume("patch", script).returncode == 1


def test_links_and_read_only_files_are_refused(script, tmp_path):
    original = script.read_bytes()
    link = tmp_path / "link.py"
    link.symlink_to(script)
    done = megaresume("patch", link)
    assert done.returncode == 1 and f"megaresume patch {script}" in done.stderr and link.is_symlink()
    link.unlink()
    os.link(script, link)
    assert "hard links" in megaresume("patch", script).stderr
    link.unlink()
    script.chmod(0o444)
    done = megaresume("patch", script)
    assert done.returncode == 1 and f"chmod u+w {script}" in done.stderr
    assert script.read_bytes() == original


def test_a_script_that_changed_meanwhile_is_left_alone(script):
    old = script.read_bytes()
    script.write_bytes(b"changed")
    with pytest.raises(PatchError, match="was changed while"):
        replace_script(script, old, b"new")
    assert script.read_bytes() == b"changed" and os.listdir(script.parent) == ["train.py"]


def test_the_megatron_beside_the_script_is_looked_at(script):
    folder = script.parent / "megatron" / "training"
    folder.mkdir(parents=True)
    (folder / "training.py").write_text("def pretrain(train_valid_test_dataset_provider, model_provider): pass\n")
    done = megaresume("patch", script)
    assert done.returncode == 1 and str(folder / "training.py") in done.stderr
