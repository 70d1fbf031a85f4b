"""The generators of a process, as they go into a checkpoint and come back; in this process, without an engine."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeed_checkpointing

from megaresume.checkpoint import generators
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.random_state import RandomState, SeedCount
from megaresume.checkpoint.records.manifest import FileEntry, Manifest
from megaresume.checkpoint.records.names import rank_file, rank_file_words
from megaresume.checkpoint.records.rank_files import random_digest, remove_orphans, write_rank_file
from megaresume.checkpoint.system import Topology
from megaresume.stream.errors import StateError

CPU = torch.device("cpu")
ONE = Topology(world_size=1)


@pytest.fixture(autouse=True)
def tracker() -> Iterator[Any]:
    found = deepspeed_checkpointing.get_cuda_rng_tracker()
    before = generators.take(CPU)
    found.reset()
    found.add("mine", 5)
    yield found
    found.reset()
    generators.put(before, CPU)


def draw(tracker: Any) -> list[Any]:
    """Some numbers of every generator; an odd number of normal ones, so that one is left over."""
    with tracker.fork("mine"):
        mine = torch.rand(3).tolist()
    return [random.random(), random.gauss(), np.random.randn(3).tolist(), torch.randn(5).tolist(), mine]


def test_every_generator_goes_on_where_it_was(tracker: Any) -> None:
    draw(tracker)
    text = json.dumps(generators.to_plain(generators.take(CPU)), allow_nan=False)
    expected = [draw(tracker), draw(tracker)]
    generators.put(generators.from_plain(json.loads(text)), CPU)
    assert [draw(tracker), draw(tracker)] == expected
    assert len(text) < 40_000


def test_taking_and_keeping_draw_nothing(tracker: Any) -> None:
    before = generators.to_plain(generators.take(CPU))
    with generators.kept():
        draw(tracker)
    assert generators.to_plain(generators.take(CPU)) == before


def test_taking_is_cheap_enough_for_every_step(tracker: Any) -> None:
    times = []
    for _ in range(200):
        began = time.perf_counter()
        generators.take(CPU)
        times.append(time.perf_counter() - began)
    assert min(times) < 1e-3  # 3 us


def plain_states() -> dict[str, Any]:
    """Of Python's and numpy's generators, by themselves."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
    return generators.to_plain(states)


def taken() -> dict[str, Any]:
    states = generators.take(CPU)
    return generators.to_plain({name: states[name] for name in ("python", "numpy")})


def test_what_nobody_drew_from_is_not_taken_apart_again(tracker: Any) -> None:
    first, again = generators.take(CPU), generators.take(CPU)
    assert first["python"] is again["python"] and first["numpy"] is again["numpy"]


DRAWS = {
    "random": random.random,
    "gauss": random.gauss,
    "getrandbits": lambda: random.getrandbits(8),
    "seed": lambda: random.seed(3),
    "setstate": lambda: random.setstate(random.Random(4).getstate()),
    "rand": np.random.rand,
    "randn": np.random.randn,
    "bytes": lambda: np.random.bytes(1),
    "numpy seed": lambda: np.random.seed(3),
    "set_state": lambda: np.random.set_state(np.random.RandomState(4).get_state(legacy=False)),
    "bits": lambda: np.random.get_bit_generator().random_raw(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=list(DRAWS))
def test_every_draw_is_seen(draw: Any) -> None:
    """Three times: a second normal number comes of the first one's bits."""
    for _ in range(3):
        draw()
        assert taken() == plain_states()


def test_bits_of_another_kind() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        for _ in range(3):
            np.random.randn()
            assert taken() == plain_states()
    finally:
        np.random.set_bit_generator(before)
    assert taken() == plain_states()


def test_a_generator_whose_memory_says_nothing_is_taken_apart_every_time() -> None:
    generator = random.Random(1)
    contents = {"nothing": lambda: None, "constant": lambda: (1,), "restless": lambda: (object(),)}
    assert not any(generators.follows(content, generator.random) for content in contents.values())
    assert generators.follows(generators.content_of_python(generator), generator.random, generator.gauss)


def test_seeds_are_those_of_the_name_and_of_nothing_else(tracker: Any) -> None:
    now = generators.take(CPU)
    first = generators.seeded(now, CPU, lambda name: f"a {name}")
    draw(tracker)
    again = generators.seeded(generators.take(CPU), CPU, lambda name: f"a {name}")
    other = generators.seeded(now, CPU, lambda name: f"b {name}")
    first, again, other = (generators.to_plain(s) for s in (first, again, other))
    assert first == again and first.keys() == now.keys()
    assert all(first[name] != other[name] for name in first)
    generators.put(generators.from_plain(first), CPU)
    assert generators.to_plain(generators.take(CPU)) == first


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_devices_generator_goes_on_where_it_was() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.rand(3, device=device)
    plain = json.loads(json.dumps(generators.to_plain(generators.take(device))))
    expected = torch.rand(5, device=device)
    generators.put(generators.from_plain(plain), device)
    assert torch.equal(torch.rand(5, device=device), expected)
    seeds = generators.seeded(generators.take(device), device, str)
    generators.put(seeds, device)
    assert torch.equal(generators.take(device)["cuda"], seeds["cuda"])


def state_at(step: int, replica: int = 0, *, module: Any = None) -> RandomState:
    """Of a run that has made so many steps; ``_iteration`` changes that.

    Args:
        step: optimizer steps.
        replica: of which it is.
        module: one that seeds its layers by a count.
    """
    count = None if module is None else SeedCount(module, "micro_offset")
    return RandomState(lambda: step, CPU, lambda: f"replica {replica}", count=count)


def saved(root: Path, state: RandomState, step: int) -> Choice:
    """A save, as far as random state is concerned."""
    state.at_save()
    entry = state.write(root, step, f"global_step{step}")
    manifest = Manifest(iteration=step, tag=f"global_step{step}", save_id="", digest="", files=(), beside=(entry,))
    return Choice(load_dir=root, tag=manifest.tag, iteration=step, record=None, manifest=manifest)


def test_what_is_drawn_between_load_and_loop_does_not_matter(tmp_path: Path, tracker: Any) -> None:
    state = state_at(7)
    choice = saved(tmp_path, state, 7)
    state.step_begins()
    expected = draw(tracker)
    for drawn in (0, 3):
        state = state_at(7)
        assert state.restore(choice, ONE, ONE, seed=1) == "random state restored"
        assert draw(tracker) == expected  # at the load already
        for _ in range(drawn):
            draw(tracker)
        state.step_begins()
        assert draw(tracker) == expected
        state.step_begins()  # the other micro-batches of the step
        assert draw(tracker) != expected
        state.step_begins_again()  # it was only a look
        state.step_begins()
        assert draw(tracker) == expected
    state._iteration = lambda: 8
    after = generators.to_plain(generators.take(CPU))
    state.at_save()
    assert generators.to_plain(state._to_write) == after
    state.step_begins()
    state.step_begins_again()
    assert generators.to_plain(generators.take(CPU)) == after


def test_a_save_within_a_step_holds_the_state_with_which_it_began(tmp_path: Path, tracker: Any) -> None:
    """The step is done again after a resume, and draws again."""
    state = state_at(7)
    state.step_begins()
    expected = draw(tracker)
    choice = saved(tmp_path, state, 7)
    state.restore(choice, ONE, ONE, seed=1)
    assert draw(tracker) == expected


def test_a_load_that_is_saved_again_at_once_is_the_same(tmp_path: Path, tracker: Any) -> None:
    state = state_at(7)
    choice = saved(tmp_path / "a", state, 7)
    state.restore(choice, ONE, ONE, seed=1)
    draw(tracker)  # not the business of the next step
    again = saved(tmp_path / "b", state, 7)
    assert again.manifest is not None and choice.manifest is not None
    assert again.manifest.beside == choice.manifest.beside
    assert random_digest(again.manifest) == random_digest(choice.manifest) is not None


def test_draws_between_a_save_and_the_next_step_are_said_once(
    tmp_path: Path, tracker: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    state = state_at(0)
    for step in (1, 2, 3):
        state.step_begins()
        state._iteration = lambda step=step: step
        saved(tmp_path, state, step)
        if step > 1:
            random.random()
    state.step_begins()
    out = capsys.readouterr().out
    assert out.count("random numbers were drawn between a save and the next step (python)") == 1


@pytest.mark.parametrize("reading", [False, True], ids=["quiet", "drawing"])
@pytest.mark.parametrize("evaluates", [False, True])
def test_draws_between_a_batch_and_a_save_are_said_and_those_of_reading_it_are_not(
    capsys: pytest.CaptureFixture[str], reading: bool, evaluates: bool
) -> None:
    state = state_at(0)
    for step in (0, 1, 2):
        state._iteration = lambda step=step: step
        assert state.step_begins()
        if reading:
            random.random()
        state.first_is_out()
        if step == 2 and evaluates:
            torch.rand(1)
        state.at_save(is_untouched=True)
        torch.rand(1)  # training
    out = capsys.readouterr().out
    assert out.count("random numbers were drawn between taking a batch and the save (torch)") == evaluates
    assert out.count("warning") == evaluates


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (Topology(world_size=2, dp=2), "world 2->1, dp 2->1"),
        (Topology(world_size=1, tp=2), "tp 2->1"),
        (None, "none in global_step7"),
    ],
)
def test_another_layout_is_seeded_by_seed_step_and_rank(
    tmp_path: Path, tracker: Any, before: Topology | None, reason: str
) -> None:
    choice = saved(tmp_path, state_at(7), 7)
    found: dict[Any, list[Any]] = {}
    for key in [(1, 7, 0), (1, 7, 0), (2, 7, 0), (1, 8, 0), (1, 7, 1)]:
        seed, step, replica = key
        state = state_at(step, replica)
        assert state.restore(choice, before, ONE, seed=seed) == f"random state reseeded ({reason})"
        state.step_begins()
        numbers = draw(tracker)[:4]
        assert found.setdefault(key, numbers) == numbers
    assert len({json.dumps(numbers) for numbers in found.values()}) == 4


@pytest.mark.parametrize(
    ("before", "words"),
    [(ONE, "random state restored"), (Topology(world_size=2, dp=2), "random state reseeded (world 2->1, dp 2->1)")],
)
def test_a_count_that_seeds_the_layers_goes_on(tmp_path: Path, tracker: Any, before: Topology, words: str) -> None:
    """On other ranks, too: no seed comes twice."""
    module = SimpleNamespace(micro_offset=28)
    state = state_at(7, module=module)
    choice = saved(tmp_path, state, 7)
    module.micro_offset = 0  # another process
    state = state_at(7, module=module)
    assert state.restore(choice, before, ONE, seed=1) == words
    assert module.micro_offset == 28
    module.micro_offset += 4  # an evaluation before the loop
    state.step_begins()
    assert module.micro_offset == 28


def test_a_count_that_no_checkpoint_has_is_named(tmp_path: Path, tracker: Any) -> None:
    choice = saved(tmp_path, state_at(7), 7)
    state = state_at(7, module=SimpleNamespace(micro_offset=0))
    assert state.restore(choice, ONE, ONE, seed=1) == "random state restored but for micro_offset"
    assert "reseeded (dp 2->1)" in state.restore(
        choice, Topology(world_size=1, dp=2), Topology(world_size=1, dp=1), seed=1
    )
    assert "reseeded (none in global_step7)" in state.restore(choice, None, ONE, seed=1)


def test_another_type_of_device_is_seeded(tmp_path: Path, tracker: Any) -> None:
    state = state_at(7)
    state.at_save()
    state._device = SimpleNamespace(type="cuda")
    entry = state.write(tmp_path, 7, "global_step7")
    manifest = Manifest(iteration=7, tag="global_step7", save_id="", digest="", files=(), beside=(entry,))
    choice = Choice(load_dir=tmp_path, tag="global_step7", iteration=7, record=None, manifest=manifest)
    assert state_at(7).restore(choice, ONE, ONE, seed=1) == "random state reseeded (cuda -> cpu)"


def test_a_rank_whose_file_is_missing_or_damaged_is_named(tmp_path: Path, tracker: Any) -> None:
    state = state_at(7)
    choice = saved(tmp_path, state, 7)
    path = tmp_path / "megaresume" / rank_file(7, "global_step7", "random", 0)
    data = path.read_bytes()
    for content in (None, b"", data[:-1], bytes([data[0] ^ 1]) + data[1:]):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(StateError, match=r"the random state of rank 0 is (missing|damaged)"):
            state.restore(choice, ONE, ONE, seed=1)
    other = FileEntry(path=rank_file(7, "global_step7", "random", 1), size=1, checksum="")
    assert choice.manifest is not None
    manifest = Manifest(iteration=7, tag="global_step7", save_id="", digest="", files=(), beside=(other,))
    without = Choice(load_dir=tmp_path, tag="global_step7", iteration=7, record=None, manifest=manifest)
    with pytest.raises(StateError, match="the checkpoint has no random state of rank 0"):
        state.restore(without, ONE, ONE, seed=1)


def test_files_of_ranks_go_with_their_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "save"
    for step, tag in ((1, "global_step1"), (2, "global_step2"), (2, "best.v2"), (3, "iter_0000003")):
        for kind in ("random", "loader"):
            write_rank_file(root, rank_file(step, tag, kind, 0), b"state")  # type: ignore[arg-type]
    (root / "best.v2").mkdir()
    (root / "iter_0000003").mkdir()
    (root / "megaresume" / "step_0000002.saving.json").touch()
    remove_orphans(root)
    kept = sorted(path.name for path in (root / "megaresume").iterdir() if path.is_dir())
    expected = [
        f"{name}.{kind}"
        for name in ("step_0000002", "step_0000002@best.v2", "step_0000003")
        for kind in ("loader", "random")
    ]
    assert kept == sorted(expected)
    assert rank_file_words(rank_file(2, "best.v2", "random", 12)) == "the random state of rank 12"
    assert rank_file_words("anything/else.json") == "anything/else.json"
