"""Run by two processes: an engine with a log of samples, and a second one that goes back and does steps again."""

from __future__ import annotations

import toy

import megaresume

toy.start()
save, logs = toy.ROOT / "save", toy.ROOT / "logs"
engine = toy.engine_of()
data = megaresume.attach(
    engine,
    toy.DATA,
    checkpoints=megaresume.Checkpoints(save_dir=save),
    loader_options=megaresume.LoaderOptions(pad_id=3),
    log_samples=logs,
)
toy.train(engine, data, 5, save)
next(data)  # of a step that is never done
data.close()
engine = toy.engine_of(micro=4)
data = megaresume.attach(
    engine,
    toy.DATA,
    checkpoints=megaresume.Checkpoints(save_dir=save),
    loader_options=megaresume.LoaderOptions(pad_id=3, num_workers=1),
    log_samples=logs,
)
engine.load_checkpoint(str(save), tag="global_step2")
toy.train(engine, data, 7, save)
data.close()
toy.finish()
