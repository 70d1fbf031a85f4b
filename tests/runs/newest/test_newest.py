"""Every layout, as its library writes it: the newest is found; damaged in any file, in any way, the one before is."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megaresume.checkpoint.load.foreign_layouts import LAYOUTS
from megaresume.runs.directory import Run
from megaresume.runs.latest import find_newest, recognise
from megaresume.stream.errors import CheckpointError, UsageError
from tests.runs.newest.conftest import Copy

#: place -> (layout, checkpoint of iteration 4, of iteration 2)
PLACES = {
    **{f"deepspeed_{stage}": ("deepspeed", "global_step4", "global_step2") for stage in (0, 1, 2, 3)},
    "deepspeed_bf16": ("deepspeed", "global_step4", "global_step2"),
    "deepspeed_tags": ("deepspeed", "best", "first"),
    "megatron_torch": ("megatron", "iter_0000004", "iter_0000002"),
    "megatron_torch_dist": ("megatron", "iter_0000004", "iter_0000002"),
    "megatron_dcp": ("megatron", "iter_0000004", "iter_0000002"),
    "verl": ("verl", "global_step_4", "global_step_2"),
    "verl_megatron": ("verl", "global_step_4", "global_step_2"),
    "hugging_face": ("hugging-face", "checkpoint-4", "checkpoint-2"),
    "hugging_face_deepspeed": ("hugging-face", "checkpoint-4", "checkpoint-2"),
}
#: a resume does not need them, or makes them anew.
OPTIONAL = {"generation_config.json", "config.json", "zero_to_fp32.py", "zero_to_torch.py", "fsdp_config.json"}


@pytest.fixture(autouse=True)
def nothing_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a file was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)


def taken(root: Path) -> str:
    found = find_newest(Run(root))
    assert found is not None and found.path is not None
    return found.path.name


@pytest.mark.parametrize("place", PLACES)
def test_the_newest(written: Path, place: str) -> None:
    layout, newest, _ = PLACES[place]
    found = find_newest(Run(written / place))
    assert found is not None and found.path == written / place / newest
    assert (found.layout, found.iteration, found.passed_over, found.notes) == (layout, 4, (), ())


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "removed": os.unlink,
    "emptied": lambda path: cut(path, 0),
    "halved": lambda path: cut(path, path.stat().st_size // 2),
    "one byte short": lambda path: cut(path, path.stat().st_size - 1),
    "zeroed": lambda path: path.write_bytes(b"\0" * path.stat().st_size),
}


def can_show(path: Path, damage: str) -> bool:
    """Whether a damage to this file matters, and can be seen without reading tensors."""
    if path.name in OPTIONAL and (damage == "removed" or path.suffix == ".py"):
        return False
    if damage == "one byte short" and path.read_bytes().endswith(b"}\n"):
        return False
    if path.suffix == ".distcp":
        return path.stat().st_size > 0 and damage != "zeroed"
    return True


@pytest.mark.parametrize("place", PLACES)
def test_every_damage_to_every_file(copy: Copy, place: str) -> None:
    root = copy(place)
    _, newest, older = PLACES[place]
    files = sorted(path for path in (root / newest).rglob("*") if path.is_file())
    tried = 0
    for path in files:
        content = path.read_bytes()
        for damage, inflict in DAMAGES.items():
            if not content or not can_show(path, damage):
                continue
            inflict(path)
            found = find_newest(Run(root))
            assert found is not None and found.path is not None
            assert found.path.name == older, f"{path.relative_to(root)} {damage}: taken although damaged"
            (rejected,) = found.passed_over
            assert rejected.tag == newest and len(rejected.reason) > 10
            tried += 1
            path.write_bytes(content)
    assert taken(root) == newest
    assert tried >= 5


@pytest.mark.parametrize("place", PLACES)
def test_nothing_complete(copy: Copy, place: str) -> None:
    root = copy(place)
    _, newest, older = PLACES[place]
    for tag in (newest, older):
        for path in (root / tag).rglob("*"):
            if path.is_file() and path.suffix in (".pt", ".safetensors", ".distcp"):
                cut(path, path.stat().st_size // 3)
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints") as caught:
        find_newest(Run(root))
    assert newest in str(caught.value) and older in str(caught.value) and "next action" in str(caught.value)


@pytest.mark.parametrize("place", [place for place, (layout, *_) in PLACES.items() if layout in ("megatron", "verl")])
def test_a_pointer_that_moves_last(copy: Copy, place: str) -> None:
    root = copy(place)
    _, newest, older = PLACES[place]
    tracker = root / "latest_checkpointed_iteration.txt"
    # A save that was over on disk but for its tracker: nobody says that every rank was done.
    tracker.write_text("2")
    found = find_newest(Run(root))
    assert found is not None and found.path == root / older
    assert [r.tag for r in found.passed_over] == [newest] and "newer than" in found.passed_over[0].reason
    for text, words in (("", "empty"), ("4x", "holds '4x'"), ("6", "names '6', which is not there")):
        tracker.write_text(text)
        found = find_newest(Run(root))
        assert found is not None and found.path == root / newest
        assert any(words in note for note in found.notes), found.notes
    tracker.unlink()
    found = find_newest(Run(root))
    assert found is not None and found.path == root / newest and "there is no latest_ch" in found.notes[0]
    # What the tracker names is gone, and nothing older is there.
    tracker.write_text("1")
    with pytest.raises(CheckpointError, match="newer than latest_checkpointed"):
        find_newest(Run(root))


def test_latest_of_deepspeed_proves_nothing(copy: Copy) -> None:
    root = copy("deepspeed_2")
    (root / "latest").write_text("global_step2")
    found = find_newest(Run(root))  # moved back on purpose, or not yet moved: it is followed
    assert found is not None and found.path == root / "global_step2" and "is newer" in found.notes[0]
    cut(root / "global_step2" / "mp_rank_00_model_states.pt", 100)
    assert taken(root) == "global_step4"
    (root / "latest").write_text("global_step4")
    (root / "global_step4" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"zero_pp_rank_1_mp_rank_00_optim_states\.pt is missing"):
        find_newest(Run(root))


def test_every_shard_of_the_last_ranks_lost(copy: Copy) -> None:
    """The highest rank's files alone: only what the model states say tells that there were two."""
    root = copy("deepspeed_3")
    for kind in ("model", "optim"):
        (root / "global_step4" / f"zero_pp_rank_1_mp_rank_00_{kind}_states.pt").unlink()
    assert taken(root) == "global_step2"
    root = copy("megatron_torch")
    shutil.rmtree(root / "iter_0000004" / "mp_rank_01")
    assert taken(root) == "iter_0000002"
    root = copy("verl")
    for kind in ("model", "optim", "extra_state"):
        (root / "global_step_4" / "actor" / f"{kind}_world_size_2_rank_1.pt").unlink()
    assert taken(root) == "global_step_2"
    root = copy("deepspeed_1")
    for rank in (0, 1):
        (root / "global_step4" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").unlink()
    assert taken(root) == "global_step2"


def test_a_killed_save_of_hugging_face(copy: Copy) -> None:
    """Its own get_last_checkpoint takes what is there after the first file was written."""
    from transformers.trainer_utils import get_last_checkpoint

    root = copy("hugging_face")
    (root / "checkpoint-6").mkdir()
    shutil.copy(root / "checkpoint-4" / "config.json", root / "checkpoint-6")
    assert get_last_checkpoint(str(root)) == str(root / "checkpoint-6")
    assert taken(root) == "checkpoint-4"
    shutil.rmtree(root / "checkpoint-6")
    shutil.copytree(root / "checkpoint-4", root / "checkpoint-6")
    found = find_newest(Run(root))
    assert found is not None and found.passed_over[0].reason == "trainer_state.json is from step 4"
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):
        (root / "checkpoint-4" / name).unlink()
    found = find_newest(Run(root))
    assert found is not None and found.path == root / "checkpoint-4" and "save_only_model" in found.notes[0]


def test_release(copy: Copy) -> None:
    root = copy("megatron_torch_dist")
    (root / "iter_0000004").rename(root / "release")
    tracker = root / "latest_checkpointed_iteration.txt"
    tracker.write_text("release")
    assert taken(root) == "release"
    tracker.write_text("2")
    assert taken(root) == "iter_0000002"
    shutil.rmtree(root / "iter_0000002")
    tracker.write_text("release")
    assert taken(root) == "release"


def test_what_it_is(written: Path, copy: Copy, tmp_path: Path) -> None:
    for place, (layout, newest, _) in PLACES.items():
        found = recognise(written / place)
        assert found is not None and found.name == layout
        if place != "hugging_face_deepspeed" and newest != "best":
            with pytest.raises(UsageError, match="one checkpoint, not a directory"):
                recognise(written / place / newest)
    with pytest.raises(UsageError, match="one checkpoint, not a directory"):
        recognise(written / "hugging_face_deepspeed" / "checkpoint-4")
    both = copy("verl")
    shutil.copytree(written / "hugging_face" / "checkpoint-4", both / "checkpoint-4")
    with pytest.raises(UsageError, match="--layout verl or --layout hugging-face"):
        find_newest(Run(both))
    for name, tag in (("verl", "global_step_4"), ("hugging-face", "checkpoint-4")):
        found = find_newest(Run(both), LAYOUTS[name])
        assert found is not None and found.path == both / tag
    for name in ("empty", "checkpoint-8"):
        (tmp_path / name).mkdir()
        assert find_newest(Run(tmp_path / name)) is None
    (tmp_path / "empty" / "latest").write_text("global_step4")
    with pytest.raises(CheckpointError, match="a pointer but no checkpoint"):
        find_newest(Run(tmp_path / "empty"))


@pytest.mark.parametrize("place", PLACES)
def test_garbage(copy: Copy, place: str) -> None:
    """Whatever the bytes: a checkpoint, or an error with words."""
    root = copy(place)
    rng = random.Random(place)
    small = [p for p in root.rglob("*") if p.is_file() and p.stat().st_size < 20_000 and p.suffix != ".py"]
    for _ in range(120):
        path = rng.choice(small)
        content = path.read_bytes()
        data = bytearray(content)
        for _ in range(rng.randrange(1, 20)):
            match rng.randrange(3):
                case 0 if data:
                    data[rng.randrange(len(data))] = rng.randrange(256)
                case 1:
                    at = rng.randrange(len(data) + 1)
                    data[at:at] = rng.randbytes(rng.randrange(30))
                case _:
                    at = rng.randrange(len(data) + 1)
                    del data[at : at + rng.randrange(60)]
        path.write_bytes(data)
        try:
            found = find_newest(Run(root))
            assert found is not None and found.path is not None and found.path.is_dir()
        except CheckpointError as error:
            assert error.found and error.action
        path.write_bytes(content)
