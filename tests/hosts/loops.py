"""Loops that people write, good and bad, on real engines over two processes: see test_loops.py."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import toy
from tqdm import tqdm

import megaresume
from megaresume.checkpoint.save.commit import begin_save
from megaresume.hosts.deepspeed.witness import Witness

toy.start()


class Recorder(torch.nn.Module):
    """A model that writes down the tokens of every forward that builds a graph, whoever else says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*toy.layers())
        self.seen: list[list[int]] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.seen.append(tokens.flatten().tolist())
        return self.layers(tokens)


class Run:
    """One engine, its data, and what its weights have seen."""

    def __init__(self, accumulation: int, **options: Any) -> None:
        import deepspeed

        self.model = Recorder()
        self.losses: list[float] = []
        sizes = toy.config(micro=2, batch=4 * accumulation, **options.pop("config", {}))
        self.engine, *_ = deepspeed.initialize(model=self.model, model_parameters=self.model.parameters(), config=sizes)
        self.data = megaresume.attach(self.engine, toy.DATA, **options)

    def backward(self, batch: Any) -> None:
        loss = toy.loss_of(self.engine(batch["tokens"]), batch["labels"], batch["loss_mask"])
        self.losses.append(loss.item())
        self.engine.backward(loss)

    def train(self, batch: Any) -> None:
        self.backward(batch)
        self.engine.step()


Loop = Callable[[Run, int], None]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__] = function
    return function


def steps(run: Run, until: int) -> Iterator[None]:
    while run.engine.global_steps < until:
        yield


# Loops that train exactly their samples.


@loop
def usual(run: Run, accumulation: int) -> None:
    for _ in steps(run, 3):
        run.train(next(run.data))


@loop
def look_first(run: Run, accumulation: int) -> None:
    next(iter(run.data))
    for batch in run.data:
        run.train(batch)
        if run.engine.global_steps == 3:
            break


@loop
def peek(run: Run, accumulation: int) -> None:
    run.engine(run.data.peek()["tokens"]).sum()  # a warm-up, with a graph
    run.model.seen.clear()
    for _ in steps(run, 3):
        looked, batch = run.data.peek(), next(run.data)
        assert looked["samples"].tolist() == batch["samples"].tolist() and looked["tokens"].equal(batch["tokens"])
        run.train(batch)


@loop
def collect_first(run: Run, accumulation: int) -> None:
    for _ in steps(run, 3):
        for batch in [next(run.data) for _ in range(accumulation)]:
            run.train(batch)


@loop
def next_behind_step(run: Run, accumulation: int) -> None:
    batches = iter(run.data)
    batch = next(batches)
    for _ in steps(run, 3):
        run.train(batch)
        batch = next(batches)


@loop
def break_and_go_on(run: Run, accumulation: int) -> None:
    """`enumerate` takes one too many before it breaks; the second loop is given it again."""
    for _ in range(3):
        for number, batch in enumerate(run.data):
            if number == accumulation:
                break
            run.train(batch)


@loop
def zip_takes_one_more(run: Run, accumulation: int) -> None:
    for _ in range(3):
        for batch, _number in zip(run.data, range(accumulation), strict=False):
            run.train(batch)


@loop
def islice(run: Run, accumulation: int) -> None:
    for _ in range(3):
        for batch in itertools.islice(run.data, accumulation):
            run.train(batch)


@loop
def empty_epochs(run: Run, accumulation: int) -> None:
    for _ in range(3):
        for batch in itertools.islice(run.data, 0):
            run.train(batch)
    usual(run, accumulation)


@loop
def split_in_two_loops(run: Run, accumulation: int) -> None:
    """`iter` in the middle of an accumulation goes on."""
    for _ in steps(run, 3):
        for batch in itertools.islice(run.data, 1):
            run.train(batch)


@loop
def two_iterators(run: Run, accumulation: int) -> None:
    """There is one position."""
    turns = itertools.cycle((iter(run.data), iter(run.data)))
    for _ in steps(run, 3):
        run.train(next(next(turns)))


@loop
def progress_bar(run: Run, accumulation: int) -> None:
    for _ in range(3):
        for number, batch in enumerate(tqdm(run.data, file=io.StringIO())):
            if number == accumulation:
                break
            run.train(batch)


@loop
def two_forwards(run: Run, accumulation: int) -> None:
    """As in GRPO and DPO: a reference without gradients, and two that are trained."""
    for _ in steps(run, 3):
        batch = next(run.data)
        with torch.no_grad():
            run.engine(batch["tokens"].flip(0))
        chosen = run.engine(batch["tokens"])
        rejected = run.engine(batch["tokens"].roll(1, 1))
        run.model.seen.pop()
        run.engine.backward((chosen - rejected).square().mean())
        run.engine.step()


@loop
def changed_inputs(run: Run, accumulation: int) -> None:
    for _ in steps(run, 3):
        batch = next(run.data)
        whole = batch["tokens"].clone()
        batch["tokens"][:, ::3] = 5
        run.train(batch)
        run.model.seen[-1] = whole.flatten().tolist()


@loop
def step_once(run: Run, accumulation: int) -> None:
    """DeepSpeed's set_gradient_accumulation_boundary: one engine.step() for all micro-batches."""
    for _ in steps(run, 3):
        for number in range(accumulation):
            run.engine.set_gradient_accumulation_boundary(number == accumulation - 1)
            run.backward(next(run.data))
        run.engine.step()


@loop
def retry(run: Run, accumulation: int) -> None:
    failed = False
    for _ in steps(run, 3):
        batch = next(run.data)
        try:
            if run.engine.global_steps == 1 and not failed:
                failed = True
                raise RuntimeError("out of memory, say")
            run.train(batch)
        except RuntimeError:
            run.train(batch)


@loop
def left_over_at_the_end(run: Run, accumulation: int) -> None:
    usual(run, accumulation)
    run.backward(next(run.data))
    run.model.seen.pop()


@loop
def log_fails(run: Run, accumulation: int) -> None:
    """The line of a step cannot be written; the step was made, and what is looked at after it is handed out again."""
    run.data = megaresume.attach(run.engine, toy.DATA, log_samples=toy.ROOT / f"log_fails{accumulation}")
    for _ in steps(run, 1):
        run.train(next(run.data))
    log = run.data._log
    write, log._write = log._write, no_space
    with contextlib.suppress(OSError):
        usual(run, accumulation)
    log._write = write
    assert run.engine.global_steps == 2
    look_first(run, accumulation)


def no_space(*_: Any) -> None:
    raise OSError("no space left on device")


@loop
def load_again(run: Run, accumulation: int) -> None:
    """Back to a checkpoint, in the middle of a run: the data goes back too."""
    save = str(toy.ROOT / f"again{accumulation}")
    for _ in steps(run, 2):
        run.train(next(run.data))
    run.engine.save_checkpoint(save)
    usual(run, accumulation)
    next(run.data)
    run.engine.load_checkpoint(save)
    del run.model.seen[2 * accumulation :]
    usual(run, accumulation)


@loop
def one_loss_of_two_forwards(run: Run, accumulation: int) -> None:
    """As in R-Drop: the same tokens twice, and one backward."""
    for _ in steps(run, 3):
        tokens = next(run.data)["tokens"]
        loss = (run.engine(tokens) - run.engine(tokens).square()).mean()
        run.model.seen.pop()
        run.engine.backward(loss)
        run.engine.step()


@loop
def two_losses_of_one_forward(run: Run, accumulation: int) -> None:
    """Each with a backward of its own."""
    for _ in steps(run, 3):
        batch = next(run.data)
        logits = run.engine(batch["tokens"])
        run.engine.backward(logits.square().mean(), retain_graph=True)
        run.engine.backward(toy.loss_of(logits, batch["labels"], batch["loss_mask"]))
        run.engine.step()


@loop
def one_loss_of_all_micro_batches(run: Run, accumulation: int) -> None:
    for _ in steps(run, 3):
        losses = []
        for number in range(accumulation):
            run.engine.set_gradient_accumulation_boundary(number == accumulation - 1)
            losses.append(run.engine(next(run.data)["tokens"]).square().mean())
        run.engine.backward(torch.stack(losses).sum())
        run.engine.step()


@loop
def evaluation_with_a_graph(run: Run, accumulation: int) -> None:
    """Without no_grad(), of other tokens and of the micro-batch itself."""
    for _ in steps(run, 3):
        batch = next(run.data)
        run.engine(batch["tokens"].flip(1))
        run.engine(batch["tokens"])
        del run.model.seen[-2:]
        run.train(batch)


@loop
def logits_changed_in_place(run: Run, accumulation: int) -> None:
    for _ in steps(run, 3):
        run.engine.backward(run.engine(next(run.data)["tokens"]).div_(2).square().mean())
        run.engine.step()


@loop
def past_the_engine(run: Run, accumulation: int) -> None:
    """The engine's own forward only for a look."""
    for _ in steps(run, 3):
        tokens = next(run.data)["tokens"]
        run.engine(tokens)
        run.model.seen.pop()
        run.engine.backward(run.engine.module(tokens).square().mean())
        run.engine.step()


# Loops that do not.


@loop
def look_with_next(run: Run, accumulation: int) -> None:
    next(run.data)
    usual(run, accumulation)


@loop
def look_in_an_accumulation(run: Run, accumulation: int) -> None:
    run.train(next(run.data))
    next(run.data)
    usual(run, accumulation)


@loop
def warm_up(run: Run, accumulation: int) -> None:
    batch = next(iter(run.data))
    run.backward(batch)
    run.model.seen.clear()
    for batch in run.data:
        run.train(batch)


@loop
def evaluate(run: Run, accumulation: int) -> None:
    run.train(next(run.data))
    with torch.no_grad():
        for _ in range(2):
            run.engine(next(run.data)["tokens"])
    usual(run, accumulation)


@loop
def another_in_its_place(run: Run, accumulation: int) -> None:
    """Counts fit: one micro-batch is evaluated, and the next one trained twice."""
    with torch.no_grad():
        run.engine(next(run.data)["tokens"])
    batch = next(run.data)
    run.train(batch)
    run.train(batch)
    usual(run, accumulation)


@loop
def no_backward(run: Run, accumulation: int) -> None:
    """The last micro-batch of the second step: its loss is not finite, say."""
    for number, batch in enumerate(run.data, 1):
        if number == 2 * accumulation:
            run.engine(batch["tokens"])
            run.engine.step()
        else:
            run.train(batch)


@loop
def no_backward_of_changed_inputs(run: Run, accumulation: int) -> None:
    for number, batch in enumerate(run.data, 1):
        whole = batch["tokens"].clone()
        batch["tokens"][:, ::3] = 5
        if number == 2 * accumulation:
            run.engine(batch["tokens"])
            run.engine.step()
        else:
            run.train(batch)
            run.model.seen[-1] = whole.flatten().tolist()


@loop
def step_without_anything(run: Run, accumulation: int) -> None:
    run.train(next(run.data))
    while True:
        next(run.data)
        run.engine.step()


@loop
def two_backwards(run: Run, accumulation: int) -> None:
    """As a retry does it that comes after the backward."""
    for number, batch in enumerate(run.data, 1):
        if number == 2 * accumulation:
            run.backward(batch)
        run.train(batch)


@loop
def the_same_twice(run: Run, accumulation: int) -> None:
    batch = next(run.data)
    for _ in range(4):
        run.train(batch)


@loop
def the_one_before(run: Run, accumulation: int) -> None:
    """What the loop makes of a micro-batch failed, and the variable still has the one before."""
    batch: Any = None
    for number, new in enumerate(run.data):
        if number != accumulation:
            batch = new
        run.train(batch)


@loop
def what_was_shown(run: Run, accumulation: int) -> None:
    for _ in steps(run, 3):
        next(run.data)
        run.train(run.data.peek())


@loop
def transform_fails(run: Run, accumulation: int) -> None:
    failed: list[str] = []

    def fails_once(batch: Any) -> Any:
        if not failed:
            failed.append("once")
            raise OSError("a picture is not there")
        return batch

    run.data = megaresume.attach(run.engine, toy.DATA, loader_options=megaresume.LoaderOptions(transform=fails_once))
    with contextlib.suppress(OSError):
        next(run.data)
    usual(run, accumulation)


def out_of_memory(*_: Any) -> None:
    raise RuntimeError("out of memory")


def ours(*_: Any) -> None:
    raise megaresume.MegaresumeError("a shard is damaged")


def _is_tried_again(run: Run, accumulation: int, error: Callable[..., None]) -> None:
    """A part of the gradients is there, and the micro-batch is tried again."""
    batch = next(run.data)
    hook = run.model.layers[0].register_full_backward_hook(error)
    with contextlib.suppress(RuntimeError, megaresume.MegaresumeError):
        run.train(batch)
    hook.remove()
    run.model.seen.clear()
    run.train(batch)
    usual(run, accumulation)


@loop
def backward_fails(run: Run, accumulation: int) -> None:
    _is_tried_again(run, accumulation, out_of_memory)


@loop
def backward_fails_by_us(run: Run, accumulation: int) -> None:
    """In a hook that reads data, say."""
    _is_tried_again(run, accumulation, ours)


@loop
def backward_fails_and_the_next_is_taken(run: Run, accumulation: int) -> None:
    hook = run.model.layers[0].register_full_backward_hook(ours)
    with contextlib.suppress(megaresume.MegaresumeError):
        run.train(next(run.data))
    hook.remove()
    run.engine.step()  # with what there is of the gradients
    usual(run, accumulation)


@loop
def step_fails(run: Run, accumulation: int) -> None:
    """The weights are changed, and the step is not counted: neither again nor into a checkpoint."""
    optimizer = run.engine.optimizer
    made = optimizer.step

    def fails(*args: Any, **more: Any) -> None:
        made(*args, **more)
        out_of_memory()

    optimizer.step = fails
    with contextlib.suppress(RuntimeError):
        usual(run, accumulation)
    optimizer.step = made
    run.engine.save_checkpoint(str(toy.ROOT / f"step_fails{accumulation}"))


@loop
def step_is_tried_again(run: Run, accumulation: int) -> None:
    optimizer = run.engine.optimizer
    made, optimizer.step = optimizer.step, out_of_memory
    with contextlib.suppress(RuntimeError):
        usual(run, accumulation)
    optimizer.step = made
    run.engine.step()


@loop
def pass_over(run: Run, accumulation: int) -> None:
    for number, batch in enumerate(run.data):
        if number == 1:
            continue  # its loss is not a number, say
        run.train(batch)


@loop
def read_ahead(run: Run, accumulation: int) -> None:
    batches = iter(run.data)
    ahead = [next(batches)]
    for _ in steps(run, 3):
        ahead.append(next(batches))
        run.train(ahead.pop(0))


@loop
def other_batches(run: Run, accumulation: int) -> None:
    for _ in steps(run, 3):
        run.train({name: value.clone() for name, value in run.data.peek().items() if isinstance(value, torch.Tensor)})


@loop
def batch_size_by_hand(run: Run, accumulation: int) -> None:
    for _ in range(accumulation + 1):
        run.train(next(run.data))
    run.engine.set_train_batch_size(4 * (accumulation + 2))
    usual(run, accumulation)


@loop
def save_in_the_middle(run: Run, accumulation: int) -> None:
    for _ in range(3):
        run.train(next(run.data))
        run.engine.save_checkpoint(str(toy.ROOT / f"middle{accumulation}"))


@loop
def attach_after_load(run: Run, accumulation: int) -> None:
    save = str(toy.ROOT / f"late{accumulation}")
    for _ in steps(run, 1):
        run.train(next(run.data))
    run.engine.save_checkpoint(save)
    late = Run(accumulation)
    type(late.engine).load_checkpoint(late.engine, save)  # past the hook: as if nothing were attached yet
    late.data = megaresume.attach(late.engine, toy.DATA)
    usual(late, accumulation)


@loop
def after_an_error(run: Run, accumulation: int) -> None:
    """Who goes on after the error is stopped at the next step."""
    batch = next(run.data)
    for _ in range(10):
        with contextlib.suppress(megaresume.MegaresumeError):
            batch = next(run.data)
        run.train(batch)


def error_of(function: Callable[[], Any]) -> list[str]:
    try:
        function()
    except megaresume.MegaresumeError as stopped:
        return [type(stopped).__name__, str(stopped)]
    return []


# A load that was forgotten.


def files(directory: Path) -> dict[str, list[float]]:
    dist.barrier()
    return {
        str(p.relative_to(directory)): [p.stat().st_size, p.stat().st_mtime]
        for p in sorted(directory.rglob("*"))
        if p.is_file() and not p.parent.name.startswith("owner_")  # of the lock, which another start takes over
    }


def forgotten() -> None:
    save, other = toy.ROOT / "forgotten", toy.ROOT / "elsewhere"
    found: dict[str, Any] = {}
    run = Run(1, checkpoints=megaresume.Checkpoints(save_dir=save))
    usual(run, 1)
    run.engine.save_checkpoint(str(save))
    run.data.close()
    before = files(save)

    def known() -> None:
        usual(Run(1, checkpoints=megaresume.Checkpoints(save_dir=save)), 1)

    def unknown() -> None:
        run = Run(1)
        usual(run, 1)
        run.engine.save_checkpoint(str(save))

    def weights_alone() -> None:
        run = Run(1, checkpoints=megaresume.Checkpoints(save_dir=save))
        run.engine.load_checkpoint(str(save), load_module_only=True)
        usual(run, 1)

    def from_another() -> None:
        run = Run(1)
        usual(run, 1)
        run.engine.save_checkpoint(str(other))
        run = Run(1)
        run.engine.load_checkpoint(str(other))
        run.train(next(run.data))
        run.engine.save_checkpoint(str(save))

    for case in (known, unknown, weights_alone, from_another):
        found[case.__name__] = error_of(case)
    after = files(save)
    found["changed"] = [name for name in before.keys() | after if before.get(name) != after.get(name)]
    found["files"] = len(before)

    def loaded() -> None:
        run = Run(1, checkpoints=megaresume.Checkpoints(save_dir=save))
        run.engine.load_checkpoint(str(save))
        run.train(next(run.data))
        run.engine.save_checkpoint(str(save))

    def killed_in_its_first_save() -> None:
        directory = toy.ROOT / "first"
        if dist.get_rank() == 0:
            state = run.data.session.data.snapshot(16)
            begin_save(directory, tag="global_step2", iteration=2, state=state).tag_dir.mkdir()
        dist.barrier()
        usual(Run(1, checkpoints=megaresume.Checkpoints(save_dir=directory)), 1)

    for case in (loaded, killed_in_its_first_save):
        found[case.__name__] = error_of(case)
    toy.result("forgotten", found)


def load_in_a_step() -> None:
    """Gradients of the step that was given up must not be in the first one after the load."""
    found = {}
    for stage in range(4):
        run = Run(2, config={"stage": stage})
        save = str(toy.ROOT / f"in_a_step{stage}")

        def losses(run: Run = run) -> list[float]:
            run.losses.clear()
            for _ in range(4):
                run.train(next(run.data))
            return list(run.losses)

        losses()
        run.engine.save_checkpoint(save)
        expected = losses()
        run.engine.load_checkpoint(save)
        run.train(next(run.data))
        run.backward(next(run.data))
        run.engine.load_checkpoint(save)
        found[f"zero {stage}"] = [expected, losses()]
    toy.result("load_in_a_step", found)


def gradients_read() -> None:
    """torch.autograd.grad trains nothing; ZeRO 1 allows it, and a backward past the engine as well."""
    found: dict[str, Any] = {}

    def loss_of(run: Run, batch: Any) -> torch.Tensor:
        return toy.loss_of(run.engine(batch["tokens"]), batch["labels"], batch["loss_mask"])

    def read(run: Run, batch: Any) -> None:
        torch.autograd.grad(loss_of(run, batch), next(run.model.parameters()))

    def read_as_well(run: Run) -> None:
        for _ in steps(run, 3):
            read(run, batch := next(run.data))
            run.train(batch)

    def only_read(run: Run) -> None:
        first, second = next(run.data), next(run.data)
        read(run, first)
        run.train(second)
        run.train(second)

    def two_backwards(run: Run) -> None:
        for _ in steps(run, 3):
            loss_of(run, batch := next(run.data)).backward()
            run.train(batch)

    for case in (read_as_well, only_read, two_backwards):
        run = Run(2, config={"stage": 1})
        found[case.__name__] = error_of(functools.partial(case, run)), int(run.engine.global_steps)
    toy.result("gradients_read", found)


def drawn_after_a_save() -> None:
    run = Run(1)
    run.train(next(run.data))
    run.engine.save_checkpoint(str(toy.ROOT / "drawn"))
    torch.rand(1)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run.train(next(run.data))
    toy.result("drawn_after_a_save", said.getvalue())


# Somebody else's loader.


class Numbers:
    """A loader with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.at += 1
            yield torch.full((2, 32), self.at - 1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Random(Numbers):
    """Its batches are drawn."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.at += 1
            yield torch.full((2, 32), int(torch.randint(toy.VOCAB, ())))


class Other(Numbers):
    """Its data set was changed since."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise ValueError("another data set")


def loaders() -> None:
    found: dict[str, Any] = {}

    def go(case: Callable[[Any, Any], list[int]]) -> list[Any]:
        engine = toy.engine_of(micro=2, batch=8)
        data = megaresume.attach(engine, Numbers())
        trained: list[int] = []
        return [error_of(lambda: trained.extend(case(engine, data))), trained]

    def train(engine: Any, batch: torch.Tensor) -> int:
        engine.backward(engine(batch).square().mean())
        engine.step()
        return int(batch[0, 0])

    def plain(engine: Any, data: Any) -> list[int]:
        return [train(engine, next(data)) for _ in range(4)]

    def peeked(engine: Any, data: Any) -> list[int]:
        return [train(engine, next(data)) for _ in range(4) if data.peek().equal(data.peek())]

    def looked(engine: Any, data: Any) -> list[int]:
        next(iter(data))
        return plain(engine, data)

    def changed(engine: Any, data: Any) -> list[int]:
        data.peek().fill_(7)
        return plain(engine, data)

    def another(engine: Any, data: Any) -> list[int]:
        with torch.no_grad():
            engine(next(data))
        batch = next(data)
        return [train(engine, batch), train(engine, batch)]

    def not_restored(engine: Any, data: Any) -> list[int]:
        plain(engine, data)
        engine.save_checkpoint(str(toy.ROOT / "not_restored"))
        engine = toy.engine_of(micro=2, batch=8)
        data = megaresume.attach(engine, Other())
        with contextlib.suppress(megaresume.MegaresumeError):
            engine.load_checkpoint(str(toy.ROOT / "not_restored"))
        return plain(engine, data)

    def saved_after_peek(engine: Any, data: Any) -> list[int]:
        found = []
        for first in (True, False):
            engine = toy.engine_of(micro=2, batch=8)
            data = megaresume.attach(engine, Random())
            if first:
                plain(engine, data)
                data.peek()
                engine.save_checkpoint(str(toy.ROOT / "saved_after_peek"))
            else:
                engine.load_checkpoint(str(toy.ROOT / "saved_after_peek"))
            found.append(plain(engine, data))
        return [int(found[0] == found[1])]

    for case in (plain, peeked, looked, changed, another, not_restored, saved_after_peek):
        found[case.__name__] = go(case)
    toy.result("loaders", found)


def crossed() -> None:
    """Two engines, and the first is given the other one's batch."""
    one, other = Run(1), Run(1)
    other.train(next(other.data))

    def swap() -> None:
        next(one.data)
        one.train(next(other.data))

    toy.result("crossed", error_of(swap))


# A pipeline engine.


def pipelines() -> None:
    found: dict[str, Any] = {}

    def go(case: Callable[[Any, Any], None]) -> list[Any]:
        engine = toy.pipeline_engine(batch=8)
        data = megaresume.attach(engine, toy.DATA, loader_options=megaresume.LoaderOptions(transform=toy.as_pair))
        return [error_of(lambda: case(engine, data)), int(engine.global_steps), data.samples_trained]

    def usual_pipeline(engine: Any, data: Any) -> None:
        data.peek()
        for _ in range(2):
            engine.train_batch(data_iter=data)

    def evaluates(engine: Any, data: Any) -> None:
        engine.train_batch(data_iter=data)
        engine.eval_batch(data_iter=data)

    def other_iterator(engine: Any, data: Any) -> None:
        engine.train_batch(data_iter=iter([data.peek()] * 9))

    def fails(engine: Any, data: Any) -> None:
        made, engine.optimizer.step = engine.optimizer.step, out_of_memory
        with contextlib.suppress(RuntimeError):
            engine.train_batch(data_iter=data)
        engine.optimizer.step = made
        engine.save_checkpoint(str(toy.ROOT / "pipeline_fails"))

    for case in (usual_pipeline, other_iterator, evaluates, fails):
        found[case.__name__] = go(case)
    web = {"path": str(toy.DATA.parent / "web"), "max_epochs": 1, "on_exhausted": "stop"}  # 300 samples
    engine = toy.pipeline_engine(micro=40, batch=80)
    mapping = {"seed": 1, "seq_length": 32, "packing": "none", "sources": {"web": web}}
    data = megaresume.attach(engine, mapping, loader_options=megaresume.LoaderOptions(transform=toy.as_pair))
    found["ends"] = [error_of(lambda: [engine.train_batch(data_iter=data) for _ in range(99)]), engine.global_steps]
    toy.result("pipelines", found)


def unguarded() -> None:
    """The model is given one micro-batch twice, and nobody stops it: what does the log say?"""
    save, logs = toy.ROOT / "unguarded", toy.ROOT / "unguarded_logs"
    guard = Witness.untrained, Witness.trained_twice
    Witness.untrained = Witness.trained_twice = lambda self, out: []
    run = Run(4, checkpoints=megaresume.Checkpoints(save_dir=save), log_samples=logs)
    another_in_its_place(run, 4)
    run.engine.save_checkpoint(str(save))
    run.data.close()
    Witness.untrained, Witness.trained_twice = guard
    toy.result("unguarded", run.data.samples_trained)


if "alone" in sys.argv:  # rank 1 errs, the other one does not
    run = Run(1)
    if dist.get_rank() == 1:
        next(run.data)
    usual(run, 1)
for accumulation in (1, 4):
    for name, function in LOOPS.items():
        run = Run(accumulation, loader_options=megaresume.LoaderOptions(prefetch=accumulation))
        error = error_of(functools.partial(function, run, accumulation))
        steps_made = int(run.engine.global_steps)
        run.data.close()
        seen = run.model.seen[: steps_made * accumulation]
        found = {"error": error, "steps": steps_made, "seen": seen, "samples": run.data.samples_trained}
        toy.result(f"{name}_{accumulation}", found)
load_in_a_step()
gradients_read()
drawn_after_a_save()
forgotten()
loaders()
crossed()
unguarded()
pipelines()  # last: DeepSpeed keeps its groups for every engine after it
toy.finish()
