"""Run by one process: loads what two processes have saved. See the tests of the same names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import toy

import megaresume

toy.start()


def elastic() -> None:
    """Two ranks to one, other micro-batches, other prefetch."""
    engine = toy.engine_of(micro=4)
    data = megaresume.attach(
        engine, toy.DATA, loader_options=megaresume.LoaderOptions(num_workers=2, start_method="fork")
    )
    engine.load_checkpoint(str(toy.ROOT / "zero0"), tag="global_step2")
    seen = toy.train(engine, data, 6)
    assert data.resume is not None
    toy.result("elastic", {"seen": seen, "line": data.resume.line()})


def larger_batch() -> None:
    """Another global batch size: the order goes on, only the boundaries move."""
    engine = toy.engine_of(micro=4, batch=12)
    data = megaresume.attach(engine, toy.DATA)
    engine.load_checkpoint(str(toy.ROOT / "zero0"), tag="global_step2")
    seen = toy.train(engine, data, 4, toy.ROOT / "larger", every=2)
    batches = list(data.state().batches)
    engine = toy.engine_of(micro=4, batch=12)
    data = megaresume.attach(engine, toy.DATA)
    engine.load_checkpoint(str(toy.ROOT / "larger"))
    toy.result("larger_batch", {"seen": seen, "batches": batches, "samples": data.samples_trained})


def partitions() -> None:
    """ZeRO on another number of ranks: refused with the command that converts, which then works."""
    found: dict[str, Any] = {}
    for stage in (1, 2, 3):
        engine = toy.engine_of(stage=stage)
        megaresume.attach(engine, toy.DATA)
        found[f"zero{stage}"] = toy.error_of(lambda e=engine, s=stage: e.load_checkpoint(str(toy.ROOT / f"zero{s}")))
    # As somebody without megaresume would.
    source = toy.ROOT / "zero1" / "global_step6"
    command = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(source), "--output_folder", f"{source}_universal"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    found["converted"] = done.returncode, done.stdout[-2000:] + done.stderr[-2000:]
    engine = toy.engine_of(stage=1, checkpoint={"load_universal": True})
    data = megaresume.attach(engine, toy.DATA)
    path, _ = engine.load_checkpoint(str(toy.ROOT / "zero1"))
    assert data.resume is not None
    found["path"] = Path(path).parent.name
    found["line"] = data.resume.line()
    found["seen"] = toy.train(engine, data, 8)
    engine.save_checkpoint(str(toy.ROOT / "zero1"))
    engine = toy.engine_of(stage=1, checkpoint={"load_universal": True})
    megaresume.attach(engine, toy.DATA)
    found["forgotten"] = toy.error_of(lambda: engine.load_checkpoint(str(toy.ROOT / "zero1")))
    engine = toy.engine_of(stage=1)
    megaresume.attach(engine, toy.DATA)
    path, _ = engine.load_checkpoint(str(toy.ROOT / "zero1"))
    found["afterwards"] = Path(path).parent.name
    engine = toy.engine_of()
    data = megaresume.attach(engine, toy.DATA)
    engine.load_checkpoint(str(toy.ROOT / "zero0"))
    found["without_zero"] = toy.train(engine, data, 8)
    toy.result("partitions", found)


def weights_only() -> None:
    engine = toy.engine_of()
    data = megaresume.attach(engine, toy.DATA)
    engine.load_checkpoint(str(toy.ROOT / "zero0"), load_module_only=True)
    first = next(data)["samples"].tolist()
    toy.result("weights_only", {"step": engine.global_steps, "first": first, "resume": data.resume is None})


def walk_back() -> None:
    """The newest checkpoint lost a file: the one before it is taken, weights and data."""
    directory = toy.ROOT / "damaged"
    shutil.copytree(toy.ROOT / "zero0", directory)
    (directory / "global_step6" / "mp_rank_00_model_states.pt").unlink()
    engine = toy.engine_of()
    data = megaresume.attach(engine, toy.DATA)
    path, _ = engine.load_checkpoint(str(directory))
    toy.result(
        "walk_back",
        {"path": Path(path).parent.name, "step": engine.global_steps, "samples": data.samples_trained},
    )


def other_working_directory() -> None:
    """A relative directory, and os.chdir between two saves: with and without Checkpoints(save_dir=...)."""
    found: dict[str, Any] = {}
    for name in ("said", "unsaid"):
        os.chdir(toy.ROOT)
        engine = toy.engine_of()
        checkpoints = megaresume.Checkpoints(save_dir=name if name == "said" else None)
        data = megaresume.attach(engine, toy.DATA, checkpoints=checkpoints)
        toy.train(engine, data, 1)
        engine.save_checkpoint(name)
        (toy.ROOT / "elsewhere").mkdir(exist_ok=True)
        os.chdir(toy.ROOT / "elsewhere")
        toy.train(engine, data, 2)
        found[name] = [
            toy.error_of(lambda e=engine, n=name: e.save_checkpoint(n)),
            toy.error_of(lambda e=engine, n=name: e.load_checkpoint(n)),
        ]
        engine.save_checkpoint(str(toy.ROOT / name))
        found[name].append(sorted(path.name for path in (toy.ROOT / name).glob("global_step*")))
        found[name].append([path.name for path in (toy.ROOT / "elsewhere").iterdir()])
        if name == "said":
            found["another"] = toy.error_of(lambda e=engine: e.save_checkpoint(str(toy.ROOT / "another")))
    toy.result("other_working_directory", found)


def attached_again() -> None:
    """In the middle of a run: refused at the next batch, unless a checkpoint is loaded."""
    root = toy.ROOT / "again"
    engine = toy.engine_of()
    data = megaresume.attach(engine, toy.DATA, checkpoints=megaresume.Checkpoints(save_dir=root))
    seen = toy.train(engine, data, 2, root, every=2)
    data = megaresume.attach(engine, toy.DATA, checkpoints=megaresume.Checkpoints(save_dir=root))
    refused = toy.error_of(lambda: next(data))
    data = megaresume.attach(engine, toy.DATA, checkpoints=megaresume.Checkpoints(save_dir=root))
    engine.load_checkpoint(str(root))
    toy.result("attached_again", {"refused": refused, "seen": [seen, toy.train(engine, data, 4)]})


elastic()
larger_batch()
partitions()
weights_only()
walk_back()
other_working_directory()
attached_again()
toy.finish()
