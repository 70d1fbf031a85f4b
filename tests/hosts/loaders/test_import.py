"""A run on Energon's loader carried over to a stream: every record of the epoch comes once, from one or the other."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from kit import RECORDS, energon_loader, key_of
from lives import live

from megaresume.batches.open import open_stream
from megaresume.cli.main import main
from megaresume.hosts.loaders import energon_import
from megaresume.hosts.loaders.energon_import import import_energon
from megaresume.hosts.loaders.energon_position import position_of
from megaresume.stream.errors import ConfigError, StateError, UsageError

WORLD = 2


@pytest.fixture(scope="session")
def indexed(energon_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data.yaml over the same directory: what a run would go on with."""
    from megaresume.images.encoder import ImageTextEncoder
    from megaresume.shards.prepare import prepare_shards

    directory = tmp_path_factory.mktemp("stream")
    encoder = ImageTextEncoder.from_options({"processor": {"kind": "patches", "size": 16, "patch_size": 8}})
    prepare_shards([energon_dataset], directory / "pairs", encoder)
    pairs = {"kind": "energon", "path": str(energon_dataset), "index": "pairs.shards.idx"}
    config = {"seed": 5, "seq_length": 128, "packing": "none", "sources": {"pairs": pairs}}
    (directory / "data.yaml").write_text(yaml.safe_dump(config))
    return directory / "data.yaml"


def run_energon(dataset: Path, batches: int, **options: Any) -> tuple[list[str], list[Any]]:
    """Keys that the ranks have trained, and their states, each rank in a process of its own."""
    keys: list[str] = []
    states: list[Any] = []
    for rank in range(WORLD):
        make = functools.partial(energon_loader, dataset, rank=rank, world=WORLD, **options)
        held, (state, _) = live(make, first=0, stop=batches)
        keys += [key for batch in held for packed, _ in batch for key in packed.split(",")]
        states.append(energon_import.pickle.loads(state)["state"])
    return keys, states


def factory(dataset: Path, **options: Any) -> Any:
    return lambda rank, world, workers: energon_loader(dataset, rank=rank, world=world, workers=workers, **options)


def planned(config: Path, epoch: int = 0) -> list[str]:
    """Keys of the records of one epoch of the stream, in its order."""
    stream = open_stream(config)
    (source,) = stream.sources
    found: list[str] = []
    first = 0
    while True:
        plan = stream.plan(first, first + 1)
        for segment in plan.segments(first):
            if segment.epoch > epoch:
                return found
            if segment.epoch == epoch:
                found.append(source.record(segment.document).key)
        first += 1


@pytest.mark.process
@pytest.mark.parametrize(
    ("batches", "options"),
    [
        pytest.param(5, {"workers": 2}, id="shuffle", marks=pytest.mark.release),
        pytest.param(3, {"workers": 2, "packing": 9}, id="packing"),
        pytest.param(6, {"workers": 0}, id="no-workers"),
    ],
)
def test_energon_and_the_stream_together_read_every_record_once(
    energon_dataset: Path, indexed: Path, tmp_path: Path, batches: int, options: dict[str, Any]
) -> None:
    trained, states = run_energon(energon_dataset, batches, **options)
    make = factory(energon_dataset, **{k: v for k, v in options.items() if k != "workers"})
    found = import_energon(states, make, data=indexed, source="pairs", output=tmp_path / "new.yaml")
    assert found.exact and found.handed == len(trained) and found.left == RECORDS - len(trained)
    rest = planned(tmp_path / "new.yaml")
    assert sorted(trained + rest) == [key_of(record) for record in range(RECORDS)]
    assert rest == [key for key in planned(indexed) if key in set(rest)]
    # The next epoch is whole again.
    assert sorted(planned(tmp_path / "new.yaml", epoch=1)) == [key_of(record) for record in range(RECORDS)]


def test_states_behind_the_last_checkpoint_of_a_worker_are_read_up_to_it(energon_dataset: Path) -> None:
    """With Energon's own default a worker keeps a state a minute: the rest is an offset, which must be read."""
    options = {"workers": 2, "every": 60}
    trained, states = run_energon(energon_dataset, 5, **options)
    assert any(worker.offset for state in states for worker in state.worker_states)
    position = position_of(states, factory(energon_dataset))
    keys = [position_key(energon_dataset, record) for record in position.handed()]
    assert sorted(keys) == sorted(trained)


def position_key(dataset: Path, record: int) -> str:
    """Energon's own name of its record."""
    loader = energon_loader(dataset, workers=0)
    from megaresume.hosts.loaders.energon_position import _leaf

    return str(_leaf(loader.dataset.dataset).join_readers[0][int(record)]["__key__"])


def test_the_command_on_files_of_megatron(
    energon_dataset: Path,
    indexed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch

    trained, states = run_energon(energon_dataset, 4, workers=2)
    files = [tmp_path / f"train_dataloader_dprank{rank:03d}.pt" for rank in range(WORLD)]
    for file, state in zip(files, states, strict=True):
        torch.save({"dataloader_state_dict": state}, file)
    (tmp_path / "task_of_run.py").write_text(
        "import kit\n\n"
        "def loader(rank, world_size, num_workers):\n"
        f"    return kit.energon_loader({str(energon_dataset)!r}, rank=rank, world=world_size, workers=num_workers)\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["--loader", "task_of_run:loader", "--data", str(indexed), "--source", "pairs", "--output", "new.yaml"]
    assert main(["import-energon", *map(str, files), *words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["exact"], report["handed_out"], report["left"]) == (True, len(trained), RECORDS - len(trained))
    assert sorted(trained + planned(tmp_path / "new.yaml")) == [key_of(record) for record in range(RECORDS)]
    assert list(np.load(tmp_path / "new.npy")) == sorted(np.load(tmp_path / "new.npy"))
    assert main(["import-energon", *map(str, files), *words]) == 0
    assert "exact: every record of the epoch comes once" in capsys.readouterr().out
    assert main(["import-energon", str(indexed), *words]) == 1
    assert "this is no state of an Energon loader" in capsys.readouterr().err


def test_what_is_not_exact_is_said(energon_dataset: Path, indexed: Path, tmp_path: Path) -> None:
    # 24 records a worker, a buffer of 10, no batch in common: rank 0 is in its second pass, rank 1 in its first.
    _, first = run_energon(energon_dataset, 30, workers=2)
    _, second = run_energon(energon_dataset, 20, workers=2)
    position = position_of([first[0], second[1]], factory(energon_dataset))
    repeated = sum(len(worker.handed_in(1)) for worker in position.workers)
    assert position.epoch == 0 and repeated > 0
    assert any(f"{repeated} records that were handed out in epoch 1 already" in said for said in position.inexact)
    _, states = run_energon(energon_dataset, 3, workers=2, shuffle_over_epochs_multiplier=-1)
    make = factory(energon_dataset, shuffle_over_epochs_multiplier=-1)
    found = import_energon(states, make, data=indexed, source="pairs", output=tmp_path / "new.yaml")
    assert not found.exact and "with replacement" in found.position.inexact[0]


def test_refusals(energon_dataset: Path, indexed: Path, tmp_path: Path) -> None:
    _, states = run_energon(energon_dataset, 2, workers=2)
    make = factory(energon_dataset)
    with pytest.raises(ConfigError, match="no source 'web'"):
        import_energon(states, make, data=indexed, source="web", output=tmp_path / "new.yaml")
    with pytest.raises(StateError, match="does not take the states back"):
        position_of(states, factory(energon_dataset, packing=9))
    with pytest.raises(UsageError, match="cannot be imported"):
        energon_import.factory_of("no_such_module:loader")
    other = tmp_path / "other"
    shutil.copytree(indexed.parent, other)
    config = yaml.safe_load(indexed.read_text())
    config["skip"] = {"documents": {"pairs": [1]}}
    (other / "data.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match="leaves out documents of 'pairs' already"):
        import_energon(states, make, data=other / "data.yaml", source="pairs", output=tmp_path / "new.yaml")
