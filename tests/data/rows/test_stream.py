"""A stream over raw files is that of the .bin: batches, digests and states, with one put in the place of the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import megaresume
from megaresume.batches.loader import StreamLoader
from megaresume.data.prepare.corpus import PrepareOptions, prepare
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.errors import MegaresumeError, StateError
from megaresume.stream.state import StreamState
from tests.data.rows.conftest import texts, write
from tests.release import release

SEQ, BATCH = 64, 8


def config(directory: Path, output: str, **more: object) -> Path:
    """A data.yaml of a source that has the same name whichever corpus it is."""
    path = directory / f"{output}.yaml"
    web = {"path": f"corpora/{output}", "split": "90,10", **more}
    sources = {"web": {"weight": 2, **web}, "more": {"path": f"corpora/{output}-more", "shuffle": "blocks"}}
    path.write_text(json.dumps({"seed": 3, "seq_length": SEQ, "packing": "best_fit", "sources": sources}))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """corpora/full and corpora/rows, each of two sources."""
    directory = tmp_path_factory.mktemp("data")
    for name, files in (("", ("a.jsonl", "b.parquet")), ("-more", ("c.arrow", "d.jsonl.gz"))):
        paths = [write(directory, file, texts(k, 300)) for k, file in enumerate(files)]
        for output, index_only in (("full", False), ("rows", True)):
            prepare(paths, directory / "corpora" / f"{output}{name}", PrepareOptions(index_only=index_only))
    return directory


def train(path: Path, first: StreamState | None, steps: int, dp: int, micro: int) -> tuple[np.ndarray, StreamState]:
    """Tokens, labels and masks of the next global batches, int64[steps * BATCH, 3, SEQ], on so many ranks."""
    stream = megaresume.open_stream(path)
    if first is not None:
        stream.restore(first)
    found = np.zeros((steps, BATCH // (dp * micro), dp, micro, 3, SEQ), np.int64)
    for rank in range(dp):
        loader = StreamLoader(stream, BatchSchedule.constant(BATCH), micro_batch_size=micro, dp_rank=rank, dp_size=dp)
        batches = iter(loader)
        for step in range(steps):
            for k in range(found.shape[1]):
                batch = next(batches)
                for field, name in enumerate(("tokens", "labels", "loss_mask")):
                    found[step, k, rank, :, field] = batch[name].numpy()
    return found.reshape(-1, 3, SEQ), StreamState.from_json(stream.state_at(stream.start + steps * BATCH).to_json())


def test_one_is_put_in_the_place_of_the_other_in_the_middle_of_a_run(data):
    full, rows = config(data, "full"), config(data, "rows")
    expected, end = train(full, None, 12, 1, 8)
    state, parts = None, []
    for path, steps, dp, micro in ((rows, 3, 2, 2), (full, 4, 4, 1), (rows, 5, 1, 4)):
        part, state = train(path, state, steps, dp, micro)
        parts.append(part)
    assert np.array_equal(np.concatenate(parts), expected)
    assert state is not None and state.to_json() == end.to_json()


PROGRAM = """
import os
import sys
import megaresume
from megaresume import BatchSchedule, StreamLoader, StreamState
path, saved, steps, dp, workers = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
if __name__ == "__main__":
    stream = megaresume.open_stream(path)
    try:
        stream.restore(StreamState.from_json(open(saved).read()))
    except FileNotFoundError:
        pass
    schedule = BatchSchedule.constant(8)
    ranks = [
        iter(StreamLoader(stream, schedule, micro_batch_size=2, dp_rank=r, dp_size=dp, num_workers=workers))
        for r in range(dp)
    ]
    for step in range(steps):
        rows = []
        for _ in range(8 // (2 * dp)):
            for rank in ranks:
                rows += next(rank)["tokens"].tolist()
        print(rows, flush=True)
        with open(saved + ".new", "w") as file:
            file.write(stream.state_at(stream.start + (step + 1) * 8).to_json())
        os.replace(saved + ".new", saved)
"""


@pytest.mark.process
@release(
    "two programs with workers",
    "`::test_one_is_put_in_the_place_of_the_other_in_the_middle_of_a_run`, "
    "`tests/cli/test_prepare.py::test_killed_twice_and_run_again_gives_the_same_bytes`",
)
def test_killed_with_workers_and_resumed_with_other_ranks(data, tmp_path):
    full, rows = config(data, "full"), config(data, "rows")
    expected = train(full, None, 60, 1, 8)[0][:, 0].tolist()
    command = [sys.executable, "-c", PROGRAM, str(rows), str(tmp_path / "state")]
    with subprocess.Popen([*command, "1000", "2", "1"], stdout=subprocess.PIPE, text=True) as process:
        printed = [process.stdout.readline() for _ in range(3)]
        os.kill(process.pid, signal.SIGKILL)
        printed += [line for line in process.stdout if line.endswith("\n")]
    saved = StreamState.from_json((tmp_path / "state").read_text()).samples
    done = subprocess.run([*command, "3", "1", "2"], capture_output=True, text=True, check=True, timeout=120)
    found = [row for line in printed for row in json.loads(line)][:saved]
    assert len(found) == saved >= 2 * BATCH
    found += [row for line in done.stdout.splitlines() for row in json.loads(line)]
    assert found == expected[: saved + 3 * BATCH]


def test_more_files_are_a_growth_and_other_ones_are_refused(tmp_path):
    first = write(tmp_path, "a.jsonl", texts(1, 100))
    second = write(tmp_path, "b.parquet", texts(2, 100))
    (tmp_path / "corpora").mkdir()
    states = {}
    for output, index_only in (("full", False), ("rows", True)):
        options = PrepareOptions(index_only=index_only, overwrite=True)
        for inputs in ([first], [first, second]):
            prepare(inputs, tmp_path / "corpora" / output, options)
            yaml = {"path": f"corpora/{output}", "append": "now"}
            path = tmp_path / f"{output}.yaml"
            path.write_text(json.dumps({"seed": 3, "seq_length": SEQ, "sources": {"web": yaml}}))
            state = states.get(output)
            batches, states[output] = train(path, state, 4, 1, 8)
        states[output, "batches"] = batches
    assert states["rows"].to_json() == states["full"].to_json() and len(states["rows"].stages) == 2
    assert np.array_equal(states["rows", "batches"], states["full", "batches"])
    prepare([second, first], tmp_path / "corpora/rows", PrepareOptions(index_only=True, overwrite=True))
    with pytest.raises((StateError, MegaresumeError), match="web"):
        train(tmp_path / "rows.yaml", states["rows"], 1, 1, 8)
