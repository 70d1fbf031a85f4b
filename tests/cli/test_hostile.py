"""Files that are not what a run wrote, given to every question about it: an answer or an error, no wait."""

from __future__ import annotations

import json
import os
import unicodedata
from dataclasses import replace

import pytest

from megaresume.checkpoint.records.names import step_path
from megaresume.checkpoint.records.sealed import seal
from megaresume.checkpoint.records.step_file import read_step_file
from megaresume.program import main

pytestmark = pytest.mark.process  # `doctor` starts one

#: of `run`: everything of ours in it, and what its questions read besides.
RECORDS = (
    "latest",
    "latest_checkpointed_iteration.txt",
    "megaresume/ledger.jsonl",
    "megaresume/data.yaml",
    "megaresume/staging.json",
    "megaresume/step_0000012.json",
    "megaresume/step_0000012.manifest.json",
    "megaresume/step_0000012.saving.json",
    "megaresume/owner_0000001/owner.json",
    "megaresume/owner_0000001/alive",
    "global_step12/mp_rank_00_model_states.pt",
    "../corpora/web.idx",
    "../corpora/web.bin",
    "../corpora/web.megaresume.json",
)


def ask(run, capsys):
    """What each question says of a run: its status and what it printed."""
    answers = {}
    questions = {
        "inspect": [run.save, "--checksums"],
        "latest": [run.save],
        "trace": [run.save, "--samples", "0:3"],
        "verify": [run.save],
        "plan": [run.save, "--dp", "2", "--num-workers", "0"],
        "report": [run.save],
        "doctor": [run.save],
        "stream": [run.data],
    }
    for command, words in questions.items():
        try:
            status = main([command, *map(str, words)])
        except SystemExit as end:
            status = end.code
        printed = capsys.readouterr()
        answers[command] = (status, printed.out + printed.err)
        assert status in (0, 1, 2), command
        assert "Traceback" not in printed.out + printed.err, command
    return answers


def test_the_questions_have_answers(run, capsys):
    answers = ask(run, capsys)
    assert {command: status for command, (status, _) in answers.items() if status} == {}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", RECORDS)
def test_a_pipe_in_the_place_of_a_file(name, run, capsys):
    path = run.save / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    answers = ask(run, capsys)
    if name.startswith("megaresume/step_0000012.") and not name.endswith("saving.json"):
        assert "a pipe, not a file" in answers["inspect"][1]


#: moves the cursor, sets a colour, begins a line of its own, turns the letters after it.
EVIL = "web\x1b[31m\x9b2J\nresumes from global_step99\r\u202e"


def reseal(path, change):
    fields = json.loads(path.read_bytes())
    del fields["checksum"]
    change(fields)
    path.write_bytes(seal(fields))


def put(name, change=None, text=None):
    """Changes one file of a run."""

    def do(run):
        if change is not None:
            reseal(run.save / name, change)
        else:
            (run.save / name).write_bytes(text.encode())

    return pytest.param(do, id=name)


def in_ledger(run):
    path = run.save / "megaresume" / "ledger.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    for fields in lines:
        del fields["checksum"]
        fields |= {"time": EVIL, "digest": EVIL, "details": {"note": EVIL}}
    path.write_bytes(b"".join(map(seal, lines)) + EVIL.encode())


def in_state(run):
    path = step_path(run.save, 12, "global_step12")
    record = read_step_file(path)
    state = replace(record.stream, overrides=(EVIL,))
    path.write_bytes(replace(record, framework=EVIL, state=state).to_bytes())


@pytest.mark.parametrize(
    "spoil",
    [
        put("latest", text=EVIL),
        put("latest_checkpointed_iteration.txt", text=EVIL),
        put("megaresume/step_0000012.json", lambda fields: fields.update(saved_at=EVIL)),
        pytest.param(in_state, id="state"),
        put("megaresume/step_0000012.manifest.json", lambda fields: fields["files"][0].__setitem__(0, EVIL)),
        put("megaresume/data.yaml", text=json.dumps({"seed": 1, "sources": {EVIL: {"path": EVIL}}})),
        pytest.param(in_ledger, id="ledger"),
    ],
)
def test_nothing_moves_the_cursor(spoil, run, capsys):
    spoil(run)
    for command, (_, printed) in ask(run, capsys).items():
        assert not hidden(printed), command
        assert not [line for line in printed.splitlines() if line.startswith("resumes from global_step99")], command
    page = run.save / "report.html"
    assert not page.exists() or not hidden(page.read_text())


def test_what_nobody_foresaw_is_no_traceback(run, capsys, monkeypatch):
    """A state of a faulty program: every checksum is right."""
    path = step_path(run.save, 12, "global_step12")
    record = read_step_file(path)
    state = replace(record.stream, config={**record.stream.config, "sources": {"web": "\ud800", "code": 1}})
    path.write_bytes(replace(record, state=state).to_bytes())
    status, printed = ask(run, capsys)["inspect"]
    assert status == 1 and "AttributeError" in printed and "MEGARESUME_TRACEBACK=1" in printed
    monkeypatch.setenv("MEGARESUME_TRACEBACK", "1")
    with pytest.raises(AttributeError):
        main(["inspect", str(run.save)])


def hidden(text):
    return [c for c in text if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")]
