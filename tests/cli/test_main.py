"""The program as a whole: help, bad usage, errors without tracebacks, and no slow start."""

from __future__ import annotations

import re

import pytest

from megaresume.command_line import normalise
from megaresume.program import COMMANDS, main
from tests.cli.conftest import megaresume, megaresume_process


@pytest.mark.process
def test_help_names_every_command():
    done = megaresume_process("--help")
    assert done.returncode == 0
    for name in COMMANDS:
        assert re.search(rf"^    {name}\s", done.stdout, re.MULTILINE), name


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    assert "usage: megaresume " + command in megaresume(command, "--help").stdout


@pytest.mark.process
def test_the_exit_status_is_that_of_the_process(tmp_path):
    done = megaresume_process("inspect", tmp_path / "nowhere")
    assert done.returncode == 2
    assert done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [("nonsense",), ("stream",), ("verify", "/nowhere"), ("inspect", "/nowhere"), ("demo", "--steps", "3")],
)
def test_bad_usage_is_status_2_without_a_traceback(words):
    done = megaresume(*words)
    assert done.returncode == 2
    assert done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "usage", "said"),
    [
        (("inspct", "x"), "megaresume [-h]", "there is no command 'inspct', did you mean 'inspect'?"),
        (("nonsense",), "megaresume [-h]", "there is no command 'nonsense'; megaresume --help lists them"),
        (
            ("prepare", "x", "--outptu", "y"),
            "megaresume prepare ",
            "there is no flag --outptu, did you mean '--output'?",
        ),
        (
            ("prepare", "x", "--output", "y", "--worker_s=3"),
            "megaresume prepare ",
            "--worker-s, did you mean '--workers'?",
        ),
        (("inspect", "x", "--jsn"), "megaresume inspect ", "there is no flag --jsn, did you mean '--json'?"),
        (("inspect", "x", "y", "z"), "megaresume inspect ", "unrecognized arguments: "),
    ],
)
def test_a_slip_is_named_under_the_usage_of_its_command(words, usage, said):
    done = megaresume(*words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"usage: {usage}") and said in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("words", [("latest",), ("doctor",), ("inspect",), ("plan",), ("plan", "--mtbf", "6h")])
def test_what_the_system_refuses_is_no_traceback(words, capsys):
    assert main([words[0], "x" * 300, *words[1:]]) == 1
    assert "File name too long" in capsys.readouterr().err


def test_dashes_and_underscores_are_the_same_in_flags_only():
    assert normalise(["x", "--a_b", "c_d", "--e_f=g_h", "--", "--i_j"]) == [
        "x",
        "--a-b",
        "c_d",
        "--e-f=g_h",
        "--",
        "--i_j",
    ]


@pytest.mark.process
def test_a_closed_pipe_is_no_crash(run):
    import subprocess
    import sys

    command = f"{sys.executable} -m megaresume stream {run.data} --samples 0:20000 | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("sample         0") and "Traceback" not in done.stderr


@pytest.mark.process
def test_the_cheap_commands_import_nothing_heavy(run):
    import subprocess
    import sys

    code = (
        "import sys; from megaresume.program import main; main(['inspect', sys.argv[1], '--json']);"
        "heavy = {'torch', 'numba', 'numpy', 'deepspeed', 'megatron'} & set(sys.modules); print(heavy, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run.save)], capture_output=True, text=True)
    assert done.stderr.strip() == "set()"


@pytest.mark.process
@pytest.mark.parametrize(
    ("closed", "status"), [("latest {save} >&-", 0), ("latest {save}x 2>&-", 1), ("--help >&-", 0)]
)
def test_a_closed_stream_is_nobody_who_reads(run, closed, status):
    """Python then has None in its place, and prints errors to standard output, where scripts read a path."""
    import subprocess
    import sys

    command = f"{sys.executable} -m megaresume {closed.format(save=run.save)}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


def test_a_working_directory_that_was_removed_is_no_traceback(tmp_path, monkeypatch, capsys):
    place = tmp_path / "gone"
    place.mkdir()
    monkeypatch.chdir(place)
    place.rmdir()
    assert main([]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_a_working_directory_that_cannot_be_listed(tmp_path, monkeypatch, capsys):
    def refuse(_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pathlib.Path.iterdir", refuse)
    assert main([]) == 0
    assert "megaresume new" in capsys.readouterr().out
