"""Run by two processes: DeepSpeed's decoupled writer. See test_background.py.

background_toy.py DATA ROOT saves     saves in flight, and every way in which they end; ends with one in flight
background_toy.py DATA ROOT kill      goes on from there; killed with a save in flight
background_toy.py DATA ROOT refused   goes on from there; every rank ends with an error with a save in flight
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import weakref
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))


def watched() -> None:
    import torch
    import toy

    import megaresume
    from megaresume.stream.errors import StateError

    os.environ |= {"CROSS_SIZE": "1", "CROSS_RANK": "0"}
    writer = {"writer": {"type": "python", "decoupled": True, "data_parallel": "replica"}}
    toy.start()

    def engine_of(stage: int, **more: Any) -> Any:
        torch.manual_seed(3)
        model = torch.nn.Sequential(*toy.layers())
        model.register_buffer("calls", torch.zeros(()))
        model.register_forward_pre_hook(lambda module, args: module.calls.add_(1) and None)
        return toy.deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=toy.config(stage=stage, **more)
        )[0]

    def pointers(root: Path) -> list[str | None]:
        paths = [root / "latest", root / "latest_checkpointed_iteration.txt"]
        return [path.read_text().strip() if path.exists() else None for path in paths]

    def micro_step(engine: Any, data: Any) -> str:
        batch = next(data)
        loss = toy.loss_of(engine(batch["tokens"]), batch["labels"], batch["loss_mask"])
        engine.backward(loss)
        engine.step()
        return loss.item().hex()

    def saves() -> None:
        root, found = toy.ROOT / "saves", {}
        engine = engine_of(1)
        found["whole"] = toy.train(engine, megaresume.attach(engine, toy.DATA), 8)
        engine = engine_of(1, checkpoint=writer)
        data = megaresume.attach(engine, toy.DATA)
        found["expected"] = megaresume.hosts.deepspeed.engine.expected_files(engine, str(root), "global_step2")
        seen = toy.train(engine, data, 2)
        engine.save_checkpoint(str(root))
        found["saved"] = pointers(root)
        seen.append([3, [], micro_step(engine, data)])
        found["in the middle of the step"] = pointers(root)
        seen.append([3, [], micro_step(engine, data)])
        found["behind the step"] = pointers(root)
        engine.save_checkpoint(str(root))
        engine.save_checkpoint(str(root), tag="again", client_state={"mine": 5})
        found["behind the next save"] = pointers(root)
        path, client = engine.load_checkpoint(str(root), tag="again")
        found["loaded in flight"] = [Path(path).parent.name, engine.global_steps, client["mine"], pointers(root)]
        seen += toy.train(engine, data, 5)
        found["seen"] = seen
        engine.save_checkpoint(str(root))
        engine.destroy()
        found["destroyed"] = pointers(root)
        # A disk in each of two nodes.
        engine = engine_of(1, checkpoint=writer)
        disk = toy.ROOT / f"node_{engine.global_rank}"
        parts = megaresume.Checkpoints(save_dir=disk, stage_to="memory://nodes/run")
        found["on nodes"] = toy.error_of(lambda: megaresume.attach(engine, toy.DATA, checkpoints=parts))
        # A writer that dies with a save in flight.
        data = megaresume.attach(engine, toy.DATA)
        engine.load_checkpoint(str(root))
        toy.train(engine, data, 6)
        found["calls"] = engine.module.calls.item()
        if engine.global_rank == 1:
            os.kill(engine.checkpoint_engine.ckpt_process.pid, signal.SIGKILL)
            engine.checkpoint_engine.ckpt_process.join()
            process, engine.checkpoint_engine.ckpt_process = engine.checkpoint_engine.ckpt_process, None
            check = megaresume.hosts.deepspeed.decoupled.check_writer
            assert check(engine) is None
            engine.checkpoint_engine.ckpt_process = process
        found["dead writer"] = toy.error_of(lambda: engine.save_checkpoint(str(root)))
        found["pointers stay"] = pointers(root)
        engine.destroy()
        engine = engine_of(1, checkpoint=writer)
        data = megaresume.attach(engine, toy.DATA)
        engine.load_checkpoint(str(root))
        engine.save_checkpoint(str(root), tag="lost")
        if engine.global_rank == 1:
            os.kill(engine.checkpoint_engine.ckpt_process.pid, signal.SIGKILL)
        found["dies"] = toy.error_of(lambda: toy.train(engine, data, 6))
        found["at step"] = engine.global_steps
        found["still"] = pointers(root)
        engine.destroy()
        # Asked to stop: what it says is saved is committed.
        engine, stop = engine_of(1, checkpoint=writer), toy.ROOT / "stop-now"
        data = megaresume.attach(
            engine,
            toy.DATA,
            checkpoints=megaresume.Checkpoints(save_dir=toy.ROOT / "stopped"),
            stop=megaresume.StopConditions(file=str(stop)),
        )
        toy.train(engine, data, 1)
        stop.touch()
        try:
            toy.train(engine, data, 3)
        except megaresume.Stopped as stopped:
            found["stopped"] = [stopped.code, engine.global_steps, pointers(toy.ROOT / "stopped"), stop.exists()]
        # The end of the program, where the directory has become unwritable: said, and no wait without end.
        engine.save_checkpoint(str(toy.ROOT / "stopped"), tag="gone")
        found["ends"] = [engine.checkpoint_engine.ckpt_process.is_alive()]
        torch.distributed.barrier()
        if engine.global_rank == 0:
            shutil.rmtree(toy.ROOT / "stopped" / "megaresume")
        torch.distributed.barrier()
        process = engine.checkpoint_engine.ckpt_process
        megaresume.hosts.deepspeed.decoupled._at_exit(weakref.ref(engine))
        process.join(5)
        found["ends"].append(process.is_alive())
        found["measured"] = data.session.stopper._save_seconds() is not None or torch.distributed.get_rank() > 0
        engine.destroy()
        # The program ends with a save in flight.
        engine = engine_of(1, checkpoint=writer)
        data = megaresume.attach(engine, toy.DATA)
        engine.load_checkpoint(str(root))
        toy.train(engine, data, 7)
        engine.save_checkpoint(str(root))
        found["at the end"] = pointers(root)
        toy.result("saves", found)
        globals()["keep"] = engine, data

    def in_flight(name: str) -> None:
        root, found = toy.ROOT / "saves", {}
        engine = engine_of(1, checkpoint=writer)
        data = megaresume.attach(engine, toy.DATA)
        engine.load_checkpoint(str(root))
        found["line"] = data.resume.line()
        found["calls"] = engine.module.calls.item()
        found["seen"] = toy.train(engine, data, 8)
        engine.save_checkpoint(str(root))
        found["writer"] = engine.checkpoint_engine.ckpt_process.pid
        found["pointers"] = pointers(root)
        toy.result(name, found)
        torch.distributed.barrier()
        globals()["keep"] = engine, data

    def kill() -> None:
        in_flight("kill")
        os.kill(os.getpid(), signal.SIGKILL)

    def refused() -> None:
        in_flight("refused")
        raise StateError("something is refused")

    {"saves": saves, "kill": kill, "refused": refused}[sys.argv[3]]()
    toy.finish()


# A writer process imports this file again.
if __name__ == "__main__":
    watched()
