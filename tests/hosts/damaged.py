"""Run by two processes: files of a checkpoint that are damaged on one rank. See test_damaged.py."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch.distributed as dist
import toy

import megaresume


def damage(path: Path, *, where: int, data: bytes) -> None:
    """Other bytes, and the same size; for all ranks."""
    if dist.get_rank() == 0:
        write(path, where=where, data=data)
    dist.barrier()


def write(path: Path, *, where: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    where = where if where >= 0 else len(content) // 2
    content[where : where + len(data)] = data
    path.write_bytes(content)


def case(name: str, *, verify: bool, where: int, data: bytes, stage: int = 1, catch: bool = False) -> None:
    """Rank 1 alone reads the file. Catch: no older one is loaded either, and the program goes on to its next case."""
    root = toy.ROOT / name
    checkpoints = megaresume.Checkpoints(save_dir=root, checksums=verify)
    engine = toy.engine_of(stage=stage)
    stream = megaresume.attach(engine, toy.DATA, checkpoints=checkpoints)
    seen = toy.train(engine, stream, 6, root)
    stream.close()
    damage(root / "global_step4" / "zero_pp_rank_1_mp_rank_00_optim_states.pt", where=where, data=data)
    damage(root / "global_step6" / "zero_pp_rank_1_mp_rank_00_optim_states.pt", where=where, data=data)
    engine = toy.engine_of(stage=stage)
    stream = megaresume.attach(engine, toy.DATA, checkpoints=checkpoints)
    if catch:
        toy.result(name, toy.error_of(lambda: engine.load_checkpoint(str(root))))
        stream.close()
        return
    engine.load_checkpoint(str(root))
    again = toy.train(engine, stream, 6)
    toy.result(name, {"line": stream.resume.line(), "same": again == [one for one in seen if one[0] > 2]})
    stream.close()


def stale(name: str) -> None:
    """Rank 1's whole file of the optimizer is that of the save before, of the same size; no checksum was taken."""
    root, checkpoints = toy.ROOT / name, megaresume.Checkpoints(save_dir=toy.ROOT / name, checksums=False)
    engine = toy.engine_of(stage=1)
    stream = megaresume.attach(engine, toy.DATA, checkpoints=checkpoints)
    seen = toy.train(engine, stream, 6, root)
    stream.close()
    older, newest = (root / f"global_step{k}" / "zero_pp_rank_1_mp_rank_00_optim_states.pt" for k in (4, 6))
    same_size = older.stat().st_size == newest.stat().st_size
    damage(newest, where=0, data=older.read_bytes())
    engine = toy.engine_of(stage=1)
    stream = megaresume.attach(engine, toy.DATA, checkpoints=checkpoints)
    engine.load_checkpoint(str(root))
    again = toy.train(engine, stream, 6)
    same = again == [one for one in seen if one[0] > 4]
    toy.result(name, {"line": stream.resume.line(), "same": same, "same size": same_size})
    stream.close()


def copies_of_each_node() -> None:
    """Every rank loads from a disk of its own, and the newest copies of rank 1 are damaged."""
    root, copy = toy.ROOT / "saved", toy.ROOT / f"disk of rank {dist.get_rank()}"
    engine = toy.engine_of(stage=1)
    stream = megaresume.attach(engine, toy.DATA, checkpoints=megaresume.Checkpoints(save_dir=root))
    toy.train(engine, stream, 6, root)
    stream.close()
    dist.barrier()
    shutil.copytree(root, copy)
    if dist.get_rank() == 1:
        write(copy / "global_step6" / "mp_rank_00_model_states.pt", where=-1, data=bytes(512))
        write(copy / "global_step4" / "zero_pp_rank_1_mp_rank_00_optim_states.pt", where=-1, data=bytes(512))
    engine = toy.engine_of(stage=1)
    stream = megaresume.attach(engine, toy.DATA)
    engine.load_checkpoint(str(copy))
    toy.result("copies", stream.resume.line())
    stream.close()


def all_damaged(name: str, *, load: bool) -> None:
    """No checkpoint can be loaded: whether the program catches that, or never asks, nothing begins at sample 0."""
    root = toy.ROOT / name
    checkpoints = megaresume.Checkpoints(save_dir=root)
    engine = toy.engine_of(stage=1)
    stream = megaresume.attach(engine, toy.DATA, checkpoints=checkpoints)
    toy.train(engine, stream, 4, root)
    stream.close()
    for step in (2, 4):
        damage(root / f"global_step{step}" / "mp_rank_00_model_states.pt", where=-1, data=bytes(512))
        if not load:  # a start that does not load compares sizes alone
            damage(root / "megaresume" / f"step_{step:07d}.manifest.json", where=0, data=b"none")
    engine = toy.engine_of(stage=1)
    stream = megaresume.attach(engine, toy.DATA, checkpoints=checkpoints)
    errors = [toy.error_of(lambda: engine.load_checkpoint(str(root)))] if load else []
    errors.append(toy.error_of(lambda: toy.train(engine, stream, 1)))
    toy.result(name, [*errors, engine.global_steps])
    stream.close()


toy.start()
copies_of_each_node()
all_damaged("all damaged, loaded", load=True)
all_damaged("all damaged, not loaded", load=False)
case("torch cannot read it", verify=False, where=0, data=b"none")
case("torch's older reader takes it for a number", verify=False, where=0, data=b"F")
case("ZeRO 3", verify=False, where=0, data=b"none", stage=3)
case("a zeroed page", verify=True, where=-1, data=bytes(512))
stale("a file of the save before")
case("a class that is not there", verify=False, where=0, data=b"cno_such\nname\n.", catch=True)
toy.finish()
