"""Run by two processes: see the tests of the same names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import toy
from pictures import Pictures

import megaresume
from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.save.commit import begin_save, commit_save
from megaresume.hosts.deepspeed.engine import expected_files
from megaresume.stream.batches import BatchSchedule

toy.start()
rank = dist.get_rank()


def copy(source: Path, target: Path) -> Path:
    if rank == 0:
        shutil.copytree(source, target)
    dist.barrier()
    return target


def zero(stage: int) -> None:
    save = toy.ROOT / f"zero{stage}"
    engine = toy.engine_of(stage=stage)
    data = megaresume.attach(engine, toy.DATA, checkpoints=megaresume.Checkpoints(save_dir=save))
    whole = toy.train(engine, data, 6, save)
    data.close()
    state = data.state()

    engine = toy.engine_of(stage=stage)
    data = megaresume.attach(engine, toy.DATA, loader_options=megaresume.LoaderOptions(num_workers=stage % 2))
    path, client = engine.load_checkpoint(str(save), tag="global_step2")
    again = toy.train(engine, data, 6)
    data.close()
    resume = data.resume
    assert resume is not None
    toy.result(
        f"zero{stage}",
        {
            "whole": whole,
            "again": again,
            "path": path,
            "line": resume.line(),
            "client": client["megaresume"]["samples"],
            "json": json.loads(json.dumps(client["megaresume"])) == client["megaresume"],
            "digests": [state.digest, data.state().digest],
            "files": sorted(p.name for p in (save / "global_step2").iterdir()),
            "expected": expected_files(engine, str(save), "global_step2"),
        },
    )


def lost_file() -> None:
    """A file that one rank should have written is not there when all have returned."""
    save = toy.ROOT / "lost"
    engine = toy.engine_of(stage=1)
    data = megaresume.attach(engine, toy.DATA)
    toy.train(engine, data, 2, save)

    def loses(save_dir: str, *args: Any, **kwargs: Any) -> Any:
        done = original(save_dir, *args, **kwargs)
        if rank == 1:
            (save / "global_step4" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
        return done

    engine = toy.engine_of(stage=1)
    original = engine.save_checkpoint
    engine.save_checkpoint = loses
    data = megaresume.attach(engine, toy.DATA)
    engine.load_checkpoint(str(save))
    error = toy.error_of(lambda: toy.train(engine, data, 4, save))
    engine = toy.engine_of(stage=1)
    data = megaresume.attach(engine, toy.DATA)
    engine.load_checkpoint(str(save))
    latest = (save / "latest").read_text()
    toy.result("lost_file", {"error": error, "latest": latest, "step": engine.global_steps})


def pipeline() -> None:
    save = toy.ROOT / "pipeline"

    def run(steps: int, load: str | None) -> tuple[list[str], Any]:
        engine = toy.pipeline_engine(batch=8)
        data = megaresume.attach(engine, toy.DATA, loader_options=megaresume.LoaderOptions(transform=toy.as_pair))
        if load is not None:
            engine.load_checkpoint(str(save), tag=load)
        losses = []
        while engine.global_steps < steps:
            losses.append(engine.train_batch(data_iter=data).item().hex())
            if load is None and engine.global_steps % 2 == 0:
                engine.save_checkpoint(str(save))
        return losses, data

    whole, _ = run(4, None)
    again, data = run(4, "global_step2")
    outside = toy.error_of(lambda: next(data))
    manifest = json.loads((save / "megaresume" / "step_0000002.manifest.json").read_text())
    toy.result(
        "pipeline",
        {
            "whole": whole,
            "again": again,
            "samples": data.samples_trained,
            "files": sorted(name for name, *_ in manifest["files"]),
            "outside": outside,
        },
    )


def clock() -> None:
    """What counts is what the optimizer has stepped on."""
    save = toy.ROOT / "clock"
    engine = toy.engine_of()
    data = megaresume.attach(engine, toy.DATA, loader_options=megaresume.LoaderOptions(prefetch=3))
    toy.train(engine, data, 1)
    ahead = [next(data)["samples"].tolist() for _ in range(2)]  # a step that is not trained
    engine.save_checkpoint(str(save))
    engine = toy.engine_of()
    data = megaresume.attach(engine, toy.DATA, loader_options=megaresume.LoaderOptions(prefetch=0))
    engine.load_checkpoint(str(save))
    after = [next(data)["samples"].tolist() for _ in range(2)]
    toy.result("clock", {"ahead": ahead, "after": after, "samples": data.samples_trained})


def ramp_up() -> None:
    schedule = BatchSchedule(((0, 4), (8, 8), (24, 12)))
    save = toy.ROOT / "ramp"

    def run(load: str | None) -> tuple[list[Any], Any]:
        engine = toy.engine_of(batch=4)
        data = megaresume.attach(engine, toy.DATA, schedule=schedule)
        if load is not None:
            engine.load_checkpoint(str(save), tag=load)
        seen = toy.train(engine, data, 6, save if load is None else None, every=1)
        return seen, data

    whole, data = run(None)
    again, resumed = run("global_step3")
    batches = [list(data.state().batches), list(resumed.state().batches)]
    toy.result("ramp_up", {"whole": whole, "again": again, "batches": batches, "samples": data.samples_trained})


def engine_sizes() -> None:
    """Without a schedule, the engine's own sizes are followed, also when they change."""
    engine = toy.engine_of(batch=4)
    data = megaresume.attach(engine, toy.DATA)
    seen = toy.train(engine, data, 2)
    engine.set_train_batch_size(12)
    engine.micro_steps = 0
    seen += toy.train(engine, data, 4)
    toy.result("engine_sizes", {"seen": seen, "batches": list(data.state().batches)})


def hooks() -> None:
    """Other wrappers stay, attaching twice does not stack, everything is passed through."""
    save = toy.ROOT / "hooks"
    engine = toy.engine_of()
    calls: list[str] = []
    original = engine.save_checkpoint

    def theirs(save_dir: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(f"theirs latest={kwargs['save_latest']} mine={kwargs['client_state'].get('mine')}")
        return original(save_dir, *args, **kwargs)

    engine.save_checkpoint = theirs
    first = megaresume.attach(engine, toy.DATA)
    hooked = engine.save_checkpoint
    data = megaresume.attach(engine, toy.DATA)
    toy.train(engine, data, 1)
    returned = engine.save_checkpoint(str(save), "mine", {"mine": 5})
    latest = [(save / name).read_text() for name in ("latest", "latest_checkpointed_iteration.txt")]
    toy.train(engine, data, 2)
    engine.save_checkpoint(str(save), save_latest=False)
    still = [(save / name).read_text() for name in ("latest", "latest_checkpointed_iteration.txt")]

    engine = toy.engine_of()
    data = megaresume.attach(engine, toy.DATA)
    path, client = engine.load_checkpoint(str(save))
    toy.result(
        "hooks",
        {
            "calls": calls,
            "same_hook": hooked is not None and hooked.__wrapped__ is theirs,
            "detached": toy.error_of(lambda: next(first)),
            "returned": returned,
            "latest": latest,
            "still": still,
            "path": Path(path).parent.name,
            "mine": client["mine"],
            "step": engine.global_steps,
        },
    )


def adopted() -> None:
    """A run that DeepSpeed alone has saved goes on with weights, optimizer and step; its samples count as trained."""
    stock = toy.ROOT / "stock"
    engine = toy.engine_of(stage=1)
    data = megaresume.attach(engine, toy.DATA)
    toy.train(engine, data, 4)
    type(engine).save_checkpoint(engine, str(stock))  # past our hook
    whole = toy.train(engine, data, 7)
    data.close()

    engine = toy.engine_of(stage=1)
    megaresume.attach(engine, toy.DATA)
    refused = toy.error_of(lambda: engine.load_checkpoint(str(stock)))
    engine = toy.engine_of(stage=1)
    data = megaresume.attach(engine, toy.DATA, adopt=True)
    engine.load_checkpoint(str(stock))
    again = toy.train(engine, data, 6, stock)
    data.close()

    engine = toy.engine_of(stage=1)
    data = megaresume.attach(engine, toy.DATA)
    engine.load_checkpoint(str(stock))
    again += toy.train(engine, data, 7)
    toy.result("adopted", {"whole": whole, "again": again, "refused": refused, "kept": list(data.state().overrides)})


def refusals() -> None:
    found: dict[str, list[str]] = {}
    good = toy.ROOT / "zero0"

    def loads(directory: Path, data: Any = toy.DATA, tag: str | None = None, **options: Any) -> list[str]:
        engine = toy.engine_of()
        megaresume.attach(engine, data, **options)
        return toy.error_of(lambda: engine.load_checkpoint(str(directory), tag=tag))

    # Loaded before attaching: the batches refuse.
    engine = toy.engine_of()
    engine.load_checkpoint(str(good))
    data = megaresume.attach(engine, toy.DATA)
    found["attached_late"] = toy.error_of(lambda: next(data))
    found["attached_late_save"] = toy.error_of(lambda: engine.save_checkpoint(str(toy.ROOT / "late")))

    # Steps on other batches.
    engine = toy.engine_of(batch=4)
    data = megaresume.attach(engine, toy.DATA)
    batch = next(data)
    for _ in range(2):
        engine.backward(toy.loss_of(engine(batch["tokens"]), batch["labels"], batch["loss_mask"]))
        type(engine).step(engine)  # past our hook
    found["other_batches"] = toy.error_of(lambda: engine.save_checkpoint(str(toy.ROOT / "other")))
    found["other_batches_wrote"] = [str((toy.ROOT / "other").exists())]

    # A key of ours with something else in it; what a load returned may be passed on.
    engine = toy.engine_of()
    data = megaresume.attach(engine, toy.DATA)
    _, kept = engine.load_checkpoint(str(copy(good, toy.ROOT / "key")))
    toy.train(engine, data, engine.global_steps + 1)
    found["key_of_ours"] = toy.error_of(
        lambda: engine.save_checkpoint(str(toy.ROOT / "key"), client_state={"megaresume": 3})
    )
    found["passed_on"] = toy.error_of(
        lambda: engine.save_checkpoint(str(toy.ROOT / "passed"), client_state={"megaresume": kept["megaresume"]})
    )

    # No records beside the checkpoint; no state within it.
    bare = copy(good, toy.ROOT / "bare")
    if rank == 0:
        shutil.rmtree(bare / "megaresume")
    dist.barrier()
    found["no_records"] = loads(bare)
    found["no_checkpoint_yet"] = loads(toy.ROOT / "nothing")

    # The weights of one checkpoint under the records of another.
    mixed = copy(good, toy.ROOT / "mixed")
    if rank == 0:
        for file in (mixed / "global_step2").iterdir():
            shutil.copy(file, mixed / "global_step6" / file.name)
    dist.barrier()
    found["mixed"] = loads(mixed, tag="global_step6")
    if rank == 0:  # records that fit the files, but not the state within them
        choice = choose(good, tag="global_step6")
        assert choice is not None and choice.state is not None
        commit_save(begin_save(mixed, tag="global_step6", iteration=6, state=choice.state))
    dist.barrier()
    found["mixed_state"] = loads(mixed, tag="global_step6")

    # Another seed, another corpus.
    text = toy.DATA.read_text()
    other = toy.ROOT / "data"
    if rank == 0:
        shutil.copytree(toy.DATA.parent, other)
        (other / "seed.yaml").write_text(text.replace("seed: 7", "seed: 8"))
        (other / "swapped.yaml").write_text(text.replace("path: web", "path: code"))
    dist.barrier()
    found["seed"] = loads(good, other / "seed.yaml")
    found["corpus"] = loads(good, other / "swapped.yaml")
    # The ranks do not see the same data.
    found["ranks_differ"] = toy.error_of(
        lambda: megaresume.attach(toy.engine_of(), other / ("seed.yaml" if rank else "swapped.yaml"))
    )
    # The same global batch, of other micro-batches.
    found["micro_batches_differ"] = toy.error_of(
        lambda: megaresume.attach(toy.engine_of(batch=8, micro=2 if rank else 4), toy.DATA)
    )
    found["rank_1_fails"] = toy.error_of(
        lambda: megaresume.attach(toy.engine_of(), other / ("nothing.yaml" if rank else "seed.yaml"))
    )
    found["no_data"] = toy.error_of(lambda: megaresume.attach(toy.engine_of()))
    found["sizes"] = toy.error_of(
        lambda: megaresume.attach(toy.engine_of(), toy.DATA, schedule=BatchSchedule(((0, 8), (16, 10))))
    )
    found["missing_tag"] = loads(good, tag="global_step3")
    engine = toy.engine_of(batch=4)
    data = megaresume.attach(engine, toy.DATA)
    toy.train(engine, data, 1)
    engine.set_train_batch_size(12)  # micro_steps is 1: DeepSpeed steps after two of three micro-batches
    found["accumulation"] = toy.error_of(lambda: toy.train(engine, data, 4))
    toy.result("refusals", found)


def exhausted() -> None:
    """Both ranks learn at the same step that the stream ends, though only one of them would run dry."""
    mapping = {
        "seed": 1,
        "seq_length": 32,
        "packing": "none",
        "sources": {"web": {"path": str(toy.DATA.parent / "web"), "max_epochs": 1, "on_exhausted": "stop"}},
    }
    engine = toy.engine_of(micro=40, batch=80)  # of the last 80 samples, only those of rank 0 exist
    data = megaresume.attach(engine, mapping)
    steps = 0

    def run() -> None:
        nonlocal steps
        while True:
            toy.train(engine, data, steps + 1)
            steps += 1

    toy.result("exhausted", {"error": toy.error_of(run), "steps": steps, "documents": data.state().documents})


def faults() -> None:
    """Each rank reads some of the broken documents; every checkpoint must have those of all, of trained samples."""
    mapping = {
        "seed": 1,
        "seq_length": 32,
        "packing": {"mode": "best_fit", "open_bins": 2},
        "sources": {"web": {"path": str(toy.DATA.parent / "web")}, "pairs": {"weight": 1}},
    }
    mapping["sources"]["web"]["weight"] = 1
    save = toy.ROOT / "faults"
    engine = toy.engine_of()
    data = megaresume.attach(
        engine,
        mapping,
        data_options=megaresume.DataOptions(objects={"pairs": Pictures()}),
        loader_options=megaresume.LoaderOptions(prefetch=3),
    )
    toy.train(engine, data, 6, save)
    own = data.faults.to_plain()
    next(data)  # of a step that is never made
    whole = data.state().faults.to_plain()
    data.close()

    engine = toy.engine_of()
    data = megaresume.attach(
        engine,
        mapping,
        data_options=megaresume.DataOptions(objects={"pairs": Pictures()}),
        loader_options=megaresume.LoaderOptions(num_workers=1),
    )
    _, client = engine.load_checkpoint(str(save), tag="global_step2")
    toy.train(engine, data, 6, toy.ROOT / "faults_again")
    data.close()
    broken = [
        [sample, "pairs", segment.document, segment.epoch, "mask", f"document {segment.document} is broken"]
        for sample, segments in enumerate(data.stream.__class__(data.stream.config, data.stream.sources).plan(0, 48))
        for segment in sorted(segments, key=lambda s: s.document)
        if segment.source == 1 and segment.document % 3 == 0
    ]
    toy.result(
        "faults",
        {
            "broken": broken,
            "own": own,
            "whole": whole,
            "at_2": client["megaresume"]["content"]["faults"],
            "again": data.state().faults.to_plain(),
        },
    )


for stage in range(4):
    zero(stage)
faults()
clock()
ramp_up()
engine_sizes()
hooks()
lost_file()
adopted()
refusals()
exhausted()
pipeline()  # last: DeepSpeed keeps its groups for every engine after it
toy.finish()
