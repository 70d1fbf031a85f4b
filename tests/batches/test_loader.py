"""The micro-batches of every rank, whatever reads them, put together give the global batches of the stream."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import pickle
import subprocess
import sys
import threading
import time

import numba
import pytest
import torch
from numba.core.compiler_lock import global_compiler_lock

from megaresume.batches.assemble import make_batch
from megaresume.batches.loader import StreamDataset, StreamLoader
from megaresume.batches.open import open_stream
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.errors import ConfigError, CorpusError, StateError, StreamExhausted, UsageError
from megaresume.testing import assert_same_samples
from tests.release import release

pytestmark = pytest.mark.process

KEYS = ("tokens", "labels", "loss_mask", "position_ids", "samples", "hashes")
IMAGE_KEYS = ("pixel_values", "image_grid_thw", "num_tiles")


def joined(parts):
    """Batches one after another as one: every key that they have."""
    whole = {key: torch.cat([part[key] for part in parts]) for key in KEYS}
    whole["cu_seqlens"] = [bounds for part in parts for bounds in part["cu_seqlens"]]
    if "pixel_values" in parts[0]:
        whole |= {key: torch.cat([part[key] for part in parts]) for key in IMAGE_KEYS}
        rows = list(itertools.accumulate((len(part["tokens"]) for part in parts), initial=0))[:-1]
        moved = [part["image_positions"] + torch.tensor([row, 0, 0]) for row, part in zip(rows, parts, strict=True)]
        whole["image_positions"] = torch.cat(moved)
        whole["faults"] = [fault for part in parts for fault in part["faults"]]
    return whole


def global_batches(open_it, num_steps, schedule, *, micro, dp, start=None, **how):
    """The steps of a run over ``dp`` ranks: for each step the rows in stream order, key by key."""
    loaders = [
        StreamLoader(open_it(), schedule, micro_batch_size=micro, dp_rank=r, dp_size=dp, start=start, **how)
        for r in range(dp)
    ]
    ranks = [iter(loader) for loader in loaders]
    sample = loaders[0].start
    steps = []
    for _ in range(num_steps):
        size = schedule.size_at(sample)
        parts = [next(ranks[r]) for _ in range(size // (micro * dp)) for r in range(dp)]
        steps.append(joined(parts))
        sample += size
    for rank in ranks:
        rank.close()
    return steps


def assert_same(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert set(x) == set(y)
        for key in x:
            if key == "faults":
                assert x[key] == y[key]
            elif key == "cu_seqlens":
                assert len(x[key]) == len(y[key]) and all(map(torch.equal, x[key], y[key]))
            else:
                assert torch.equal(x[key], y[key]), key


@pytest.fixture(scope="module")
def open_it(blend):
    return blend.open


@pytest.fixture(scope="module")
def expected(open_it):
    """Twelve steps of 8, straight from the plan."""
    stream = open_it()
    assembler = StreamDataset(stream).assembler
    return [make_batch(stream.plan(c, c + 8), assembler) for c in range(0, 96, 8)]


@pytest.mark.parametrize("dp, micro", [(1, 1), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)])
def test_any_ranks_and_micro_batches(open_it, expected, dp, micro):
    steps = global_batches(open_it, 12, BatchSchedule.constant(8), micro=micro, dp=dp, prefetch=3)
    assert_same(steps, expected)
    assert steps[0]["samples"].tolist() == list(range(8))


def test_an_object_goes_by_the_name_of_today(config, notes):
    def state_and_batch(config, **objects):
        stream = open_stream(config, objects=objects, state=state)
        batch = next(iter(StreamLoader(stream, BatchSchedule.constant(4), micro_batch_size=4)))
        return stream.state_at(40), batch

    state = open_stream(config, objects={"notes": notes}).state_at(40)
    _, expected = state_and_batch(config, notes=notes)
    sources = {name: entry for name, entry in config["sources"].items() if name != "notes"}
    for entry in ({"weight": 0.1, "was": "notes"}, {"weight": 0.1}):  # ``was`` may be removed later
        renamed = config | {"sources": sources | {"memos": entry}}
        state, batch = state_and_batch(renamed, memos=notes)
        assert_same([batch], [expected])
    with pytest.raises(ConfigError, match="source 'notes', which the data config does not have"):
        open_stream(renamed, objects={"notes": notes})


@pytest.mark.parametrize("fields", [(), ("labels",), ("loss_mask", "position_ids")])
def test_fields_that_nobody_needs_are_left_out(config, notes, fields):
    def batches(**options):
        stream = open_stream(config, objects={"notes": notes})
        return list(StreamLoader(stream, BatchSchedule.constant(4), micro_batch_size=4, stop=80, **options))

    left_out = {"labels", "loss_mask", "position_ids"} - {*fields}
    expected = [{key: batch[key] for key in batch if key not in left_out} for batch in batches()]
    assert_same(batches(fields=fields), expected)


@pytest.mark.parametrize("fields", ["labels", ("tokens",), ("mask",)])
def test_no_such_field(config, notes, fields):
    stream = open_stream(config, objects={"notes": notes})
    with pytest.raises(UsageError, match="no such field"):
        StreamLoader(stream, BatchSchedule.constant(4), micro_batch_size=4, fields=fields)


RELEASE = release(
    "`[2-forkserver]`: another way to start workers",
    "the same, `[2-spawn]` and `[3-fork]`",
)


@pytest.mark.parametrize(
    "num_workers, start_method",
    [(3, "fork"), (2, "spawn"), pytest.param(2, "forkserver", marks=RELEASE)],
)
def test_any_workers_however_started(open_it, expected, num_workers, start_method):
    how = {"num_workers": num_workers, "start_method": start_method}
    dp = 2 if start_method == "fork" else 1  # the others import everything in every worker
    assert_same(global_batches(open_it, 12, BatchSchedule.constant(8), micro=4, dp=dp, **how), expected)


@pytest.mark.parametrize("how", [{"prefetch": 0}, {"prefetch": 2}, {"num_workers": 2, "start_method": "fork"}])
def test_resumed_in_any_way_it_goes_on(open_it, expected, how):
    """States taken while batches were read ahead; resumed with other ranks, twice."""
    stream = open_it()
    loader = iter(StreamLoader(stream, BatchSchedule.constant(8), micro_batch_size=8, **how))
    for _ in range(3):
        next(loader)
    state = stream.state_at(24)
    loader.close()
    second = open_it(state)
    assert_same(
        global_batches(lambda: open_it(state), 1, BatchSchedule.constant(8), micro=2, dp=2, **how), expected[3:4]
    )
    state = second.state_at(32)
    steps = global_batches(lambda: open_it(state), 8, BatchSchedule.constant(8), micro=1, dp=4, prefetch=1)
    assert_same(steps, expected[4:])


def test_a_ramp_up_moves_only_the_boundaries(open_it, expected):
    schedule = BatchSchedule.ramp_up(4, 4, 24, 16)
    steps = global_batches(open_it, 8, schedule, micro=2, dp=2)
    assert [len(s["samples"]) for s in steps][:4] == [4, 4, 8, 12]
    ramped, whole = joined(steps), joined(expected)
    for key in (*KEYS, *IMAGE_KEYS) if "pixel_values" in whole else KEYS:
        num = min(len(ramped[key]), len(whole[key]))
        assert num > 80
        assert torch.equal(ramped[key][:num], whole[key][:num])


RELEASE_2 = release(
    "`[spawn]`: another way to start a worker",
    "the same, `[fork]`, and `::test_any_workers_however_started`: `[2-spawn]`",
)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="thread"),
        pytest.param({"prefetch": 0}, id="in-process"),
        pytest.param({"num_workers": 1, "start_method": "fork"}, id="fork"),
        pytest.param({"num_workers": 1, "start_method": "spawn"}, id="spawn", marks=RELEASE_2),
    ],
)
def test_a_stream_restored_after_the_loader_was_built(open_it, how):
    """The loader still begins at sample 0, which the stream has left: never the samples of a fresh start instead."""
    stream = open_it()
    loader = StreamLoader(stream, BatchSchedule.constant(8), micro_batch_size=8, **how)
    stream.restore(open_it().state_at(24))
    with pytest.raises(StateError, match=r"sample \d+ is before the state"):
        next(iter(loader))


@pytest.mark.parametrize(
    "to_worker", [copy.copy, lambda stream: pickle.loads(pickle.dumps(stream))], ids=["fork", "spawn"]
)
def test_workers_take_the_fingerprints_from_their_parent(config, notes, monkeypatch, to_worker):
    stream = open_stream(config, objects={"notes": notes})
    stream.restore(stream.state_at(8))
    # It is only asked for to check a state; a worker would ask a slow source for every length once more.
    monkeypatch.setattr(type(notes), "fingerprint", _not_again, raising=False)
    assert_same_samples(to_worker(stream).plan(8, 24), stream.plan(8, 24))


def test_a_worker_forked_while_another_thread_compiles():
    """For example the prefetch thread of another loader: the worker must not inherit a lock that nobody frees."""
    compiling = threading.Event()

    def compile_for_long():
        with global_compiler_lock:
            compiling.set()
            time.sleep(0.5)

    thread = threading.Thread(target=compile_for_long)
    thread.start()
    compiling.wait()
    worker = multiprocessing.get_context("fork").Process(target=_compile)
    worker.start()
    worker.join(timeout=30)
    stuck = worker.is_alive()
    worker.kill()
    thread.join()
    assert not stuck and worker.exitcode == 0


def _compile():
    numba.njit(lambda x: x + 1)(1)


def _not_again(self):
    raise CorpusError("the fingerprint was asked for again")


@pytest.mark.parametrize("how", [{}, {"num_workers": 2}])
def test_reading_leaves_the_random_numbers_of_the_model_alone(open_it, how):
    """Dropout must not depend on the number of workers, nor on how often a loader was begun."""
    torch.manual_seed(7)
    expected = torch.rand(4)
    loader = StreamLoader(open_it(), BatchSchedule.constant(8), micro_batch_size=8, **how)
    torch.manual_seed(7)
    next(iter(loader))
    assert torch.equal(torch.rand(4), expected)


def test_a_second_for_does_not_begin_again_unasked(open_it):
    loader = StreamLoader(open_it(), BatchSchedule.constant(8), micro_batch_size=4)

    def samples(batches):
        return [batch["samples"].tolist() for batch in batches]

    assert samples(itertools.islice(loader, 4)) == [list(range(first, first + 4)) for first in (0, 4, 8, 12)]
    for _ in range(2):
        with pytest.raises(UsageError, match="would begin again with its first sample"):
            next(iter(loader))
    loader.start = 16
    assert samples(itertools.islice(loader, 1)) == [[16, 17, 18, 19]]
    # A validation is measured again and again.
    loader.stop = 24
    assert samples(loader) == samples(loader) == [[16, 17, 18, 19], [20, 21, 22, 23]]


def test_a_number_is_no_schedule(open_it):
    with pytest.raises(UsageError, match=r"not a BatchSchedule(.|\n)*BatchSchedule\.constant\(8\)"):
        StreamLoader(open_it(), 8, micro_batch_size=2)


def test_a_global_batch_that_does_not_divide_is_refused_at_once(open_it):
    with pytest.raises(UsageError) as error:
        StreamLoader(open_it(), BatchSchedule.constant(10), micro_batch_size=2, dp_size=2)
    assert "10" in str(error.value) and "8 or 12" in str(error.value)


@pytest.mark.parametrize("how", [{"prefetch": 0}, {"prefetch": 2}, {"num_workers": 2, "start_method": "fork"}])
def test_the_end_of_the_stream_and_errors_reach_the_consumer(config, notes, how):
    finite = {n: s | {"max_epochs": 1} for n, s in config["sources"].items()}
    stream = open_stream(config | {"sources": finite}, objects={"notes": notes})
    loader = StreamLoader(stream, BatchSchedule.constant(4), micro_batch_size=4, **how)
    seen = []
    with pytest.raises(StreamExhausted, match="the stream has ended"):
        for batch in loader:
            seen.extend(batch["samples"].tolist())
    assert seen == list(range(len(seen))) and len(seen) > 100


@pytest.mark.parametrize("how", [{"prefetch": 0}, {"prefetch": 2}, {"num_workers": 2, "start_method": "fork"}])
def test_all_ranks_end_at_the_same_step(config, notes, how):
    """The stream ends within a global batch, of which rank 0 could still get samples."""
    finite = {n: s | {"max_epochs": 1} for n, s in config["sources"].items()}
    streams = [open_stream(config | {"sources": finite}, objects={"notes": notes}) for _ in range(2)]
    with pytest.raises(StreamExhausted) as ended:
        streams[0].plan(0, 10**6)
    total = int(str(ended.value.found).split()[-2])
    size = next(size for size in (40, 36, 44) if 0 < total % size < size / 2)
    batches = []
    for rank, stream in enumerate(streams):
        batches.append(0)
        loader = StreamLoader(
            stream, BatchSchedule.constant(size), micro_batch_size=size // 4, dp_rank=rank, dp_size=2, **how
        )
        with pytest.raises(StreamExhausted, match="the stream has ended"):
            for _ in loader:
                batches[rank] += 1
    assert batches == [total // size * 2] * 2


def test_a_damaged_source_stops_the_consumer(config, notes):
    class Broken(type(notes)):
        def get(self, i):
            raise CorpusError("disk gone")

    stream = open_stream(config, objects={"notes": Broken(notes.documents)})
    for how in ({"prefetch": 2}, {"num_workers": 1, "start_method": "fork"}):
        with pytest.raises(CorpusError, match="disk gone"):
            list(itertools.islice(StreamLoader(stream, BatchSchedule.constant(4), micro_batch_size=4, **how), 50))


def test_dataset_under_a_plain_dataloader(open_it, expected):
    """Level 2 of the design: any sampler that counts from the consumed samples is exact."""
    dataset = StreamDataset(open_it(), num_samples=96)
    assert len(dataset) == 96
    numbers = (95, 0, 40, 39)
    for i in numbers:
        assert torch.equal(dataset[i]["tokens"][0], torch.cat([e["tokens"] for e in expected])[i])
    assert_same([joined([dataset[i] for i in numbers])], [dataset.__getitems__(numbers)])


def test_open_stream_from_classic_data_path(corpora):
    web, code = corpora
    words = open_stream(["0.6", web, "0.3", code], seq_length=64, seed=3)
    mapping = open_stream(
        {"seed": 3, "sources": {"web": {"path": web, "weight": 6}, "code": {"path": code, "weight": 3}}}, seq_length=64
    )
    assert words.state_at(40).to_json() == mapping.state_at(40).to_json()


def test_a_source_without_anything_to_open_is_an_error(config):
    with pytest.raises(ConfigError, match="notes"):
        open_stream(config)


ENDS_WHILE_READING = """
import sys, numpy as np, torch
from megaresume.batches.loader import StreamLoader
from megaresume.batches.open import open_stream
from megaresume.stream.batches import BatchSchedule

class Source:
    def __len__(self): return 1000
    def length(self, i): return 17
    def get(self, i):
        rows = [torch.full((17,), i)] * 50
        for _ in range(400):
            stacked = torch.stack(rows)  # lets other threads run, and wants Python back
        return stacked[0].numpy()

config = {"seq_length": 16, "seed": 1, "sources": {"own": {"weight": 1.0}}}
stream = open_stream(config, objects={"own": Source()})
batches = iter(StreamLoader(stream, BatchSchedule.constant(2), micro_batch_size=2, dp_rank=0, dp_size=1, prefetch=100))
print(next(batches)["samples"].tolist())
"""


def test_a_program_ends_while_the_next_batch_is_read() -> None:
    """torch would abort it: status -6, after a training that went well."""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", ENDS_WHILE_READING], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "[0, 1]\n"), done.stderr


def test_a_program_that_waits_for_a_slow_read_at_its_end_says_so() -> None:
    """And not a word of the iterator that nobody has finished, which may outlive the modules that it needs."""
    slow = ENDS_WHILE_READING.replace("rows = ", "time.sleep(3 * (i > 0 and Source.slow))\n        rows = ")
    slow = slow.replace("import sys, ", "import sys, time, ").replace(
        "class Source:", "class Source:\n    slow = False"
    )
    slow += "\nSource.slow = True\ntime.sleep(0.5)\nimport megaresume.batches.workers as module\nmodule.atexit = None\n"
    done = subprocess.run([sys.executable, "-c", slow], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[0, 1]\n"), done.stderr
    assert done.stderr.count("megaresume: the program has ended, and waits for a batch that is being read ahead") == 1
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
