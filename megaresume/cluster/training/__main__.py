"""From flags to a trained model: ``torchrun -m megaresume.cluster.training``, and other launchers."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from megaresume import importing
from megaresume.checkpoint.ending import run_program
from megaresume.checkpoint.ranks import is_rank_0, on_all_ranks, on_rank_0
from megaresume.checkpoint.settings import DataOptions
from megaresume.cluster.training.launch import (
    Arguments,
    announce,
    check_layout,
    launch,
    parse_arguments,
    rank_and_size,
    shut_down,
    stop_at_once,
)
from megaresume.hosts.attach import attach
from megaresume.stream.batches import BatchSchedule, end_of_run, is_over
from megaresume.stream.errors import MegaresumeError, UsageError, missing_package

if TYPE_CHECKING:
    from megaresume.cluster.training.logging import SampleLog, Stopwatch
    from megaresume.cluster.training.loop import Trainer, Validation
    from megaresume.stream.stream import Stream


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program.

    Returns:
        exit status: 0 when the run is finished, or stopped for now (another with --megaresume-stop-status); 1 when it
            failed; 2 on bad usage.
    """
    sys.excepthook = _die
    rank, world_size = rank_and_size()
    try:
        args = parse_arguments(sys.argv[1:] if argv is None else argv)
        check_layout(args, world_size)
    except UsageError as error:
        # Every rank finds the same; rank 0 prints it, before the launcher ends it because another rank has ended.
        if rank == 0:
            print(f"megaresume: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(2)
        return 2
    try:
        return _run(args)
    except MegaresumeError as error:
        shared = getattr(error, "known_to_all_ranks", False)
        if rank == 0 or not shared:
            print(f"megaresume: rank {rank}: {error}", file=sys.stderr, flush=True)
        if shared:
            # All ranks are here. None may end before rank 0 has printed why: its launcher would end rank 0.
            on_rank_0(lambda: None)
        stop_at_once(2 if isinstance(error, UsageError) else 1)
    except ModuleNotFoundError as error:
        explained = missing_package(error, "megaresume.cluster.training", "deepspeed,megatron")
        if explained is None:
            raise
        if rank == 0:
            print(f"megaresume: {explained}", file=sys.stderr, flush=True)
        return 1


def _die(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End at once: a rank that waits for others while exiting keeps the launcher from ending them."""
    # During this call, sys.stderr is a buffer of torch whose content would be lost.
    traceback.print_exception(kind, error, trace, file=sys.__stderr__)
    stop_at_once(130 if kind is KeyboardInterrupt else 1)


def _run(args: Arguments) -> int:
    """Train, and return the exit status."""
    with importing():  # a fifth of which would be the garbage collector's
        device = launch(args)
        # Deferred, here and below: importing torch, DeepSpeed and megatron-core takes seconds, which bad flags should
        # not.
        import torch.distributed as dist

        from megaresume.batches.open import open_stream
        from megaresume.cluster.training.logging import Stopwatch
        from megaresume.cluster.training.loop import Trainer
        from megaresume.cluster.training.model import LearningRate
        from megaresume.cluster.training.vision import image_encoder

    dp, schedule = check_layout(args, dist.get_world_size())
    _prepare_load(args, dp)
    on_data = Stopwatch()
    with on_data:
        data_options = on_all_ranks(lambda: _data(args))
        stream = on_all_ranks(lambda: open_stream(**data_options, on_change=args.data_options.on_change))
    vocab_size = on_all_ranks(lambda: _vocab_size(args, stream.sources))
    encoder = on_all_ranks(lambda: image_encoder(args, stream.sources))
    engine = _engine(
        args, schedule, device, seq_length=stream.config.seq_length, vocab_size=vocab_size, encoder=encoder
    )
    with on_data:
        data = _attach(args, engine, stream, schedule)
    on_data.watch(data, "restore")
    _load(args, engine)
    on_all_ranks(lambda: stream.skip(end=_last_sample(args, engine, data)))  # nothing beyond the end can be skipped
    # After the load: a run that resumes measures what it measured from the start.
    validation = _validation(
        args,
        data_options,
        stream,
        encoder,
        global_batch_size=schedule.segments[-1][1],
        vocab_size=vocab_size,
        device=device,
    )
    over = is_over(int(engine.global_steps), data.samples_trained, **args.length)
    trains = not (over or args.skip_train)
    data.session.begin(trains=trains)
    trainer = Trainer(
        args,
        engine,
        data,
        device=device,
        rate=LearningRate.from_arguments(args, schedule),
        validation=validation,
        log=_started_log(args, engine, data, on_data),
        vocab_size=vocab_size,
    )
    status = _train(args, trainer, trains=trains)
    if trainer.is_over and not args.skip_train:
        data.session.finish()
    data.close()
    shut_down()
    return status


def _prepare_load(args: Arguments, dp: int) -> None:
    """Prepare the load before anything is on the GPU: it may take long, or be refused."""
    from megaresume.hosts.deepspeed.elastic import prepare_load

    if args.load is not None:
        prepare_load(args.load, zero_stage=args.zero_stage, partitions=dp, tag=_tag(args), elastic=args.launch.elastic)


def _engine(
    args: Arguments, schedule: BatchSchedule, device: Any, *, seq_length: int, vocab_size: int, encoder: Any
) -> Any:
    """DeepSpeed's engine, with model and optimizer."""
    import deepspeed
    import torch.distributed as dist

    from megaresume.cluster.training.model import ModelParallelUnit, build_model, build_optimizer, deepspeed_config
    from megaresume.cluster.training.vision import with_vision

    model = build_model(args, vocab_size=vocab_size, seq_length=seq_length, device=device)
    if encoder is not None:
        model = with_vision(args, model, encoder, device)
    optimizer = build_optimizer(args, model, device)
    announce(f"megaresume: device {device}; {dist.get_backend()}")
    size = sum(parameter.numel() for parameter in model.parameters())
    config = deepspeed_config(args, global_batch_size=schedule.size_at(0), num_parameters=size)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=ModelParallelUnit())
    return engine


def _attach(args: Arguments, engine: Any, stream: Stream, schedule: BatchSchedule) -> Any:
    """The training data, which is saved and loaded with the engine."""
    return attach(
        engine,
        stream,
        checkpoints=replace(args.checkpoints, save_dir=args.save),
        metrics=args.launch.metrics,
        elastic=args.launch.elastic,
        loader_options=replace(args.loader_options, num_workers=args.num_workers),
        data_options=DataOptions(skip=on_all_ranks(lambda: _skip(args))),
        schedule=schedule,
    )


def _validation(
    args: Arguments, data_options: Mapping[str, Any], training: Stream, encoder: Any, **sizes: Any
) -> Validation:
    """The validation sets and held-out data."""
    from megaresume.batches.open import open_validation
    from megaresume.cluster.training.loop import Validation

    sets, held_out = {}, None
    if args.eval_iters:
        sets = on_all_ranks(lambda: open_validation(training=training, **data_options))
    if args.megaresume_held_out is not None:
        held_out = on_all_ranks(lambda: _open_held_out(args, training.config.seq_length, encoder))
    return Validation(args, sets=sets, held_out=held_out, **sizes)


def _started_log(args: Arguments, engine: Any, data: Any, on_data: Stopwatch) -> SampleLog:
    """The log for --megaresume-log-samples, with a line for this start."""
    from megaresume.cluster.training.logging import SampleLog

    log = on_all_ranks(
        lambda: SampleLog(
            args.megaresume_log_samples,
            attempt=data.attempt or 1,
            topology=data.host.topology(),
            writes=is_rank_0(),
        )
    )
    with on_data:
        digest = data.stream.digest_at(data.samples_trained)
    log.start(
        step=engine.global_steps, samples=data.samples_trained, digest=digest, data_seconds=round(on_data.seconds, 6)
    )
    return log


def _train(args: Arguments, trainer: Trainer, *, trains: bool) -> int:
    """Train, or do what is to be done instead; returns the exit status."""
    from megaresume.checkpoint.stopping import Stopped

    if trains:
        try:
            trainer.train()
        except Stopped as stopped:
            return int(stopped.code or 0)
    elif args.skip_train:
        trainer.validate()
    else:
        steps, samples = trainer.engine.global_steps, trainer.data.samples_trained
        announce(f"megaresume: the run is over: {steps} steps, {samples} samples trained")
    return 0


def _skip(args: Arguments) -> Any:
    """The samples left out by flags."""
    from megaresume.stream.skips import SkipConfig, parse_range, union

    words = args.data_options.skip or ()
    return SkipConfig(samples=union([parse_range(word, "--megaresume-skip-samples") for word in words]))


def _last_sample(args: Arguments, engine: Any, data: Any) -> int | None:
    """The number of samples at the end of the run, by its past and future batch sizes; None if it has no end."""
    if args.train_iters is None and args.train_samples is None:
        return None
    return end_of_run(data.schedule, int(engine.global_steps), data.samples_trained, **args.length)[1]


def _data(args: Arguments) -> dict[str, Any]:
    """The arguments of `open_stream` and `open_validation`; reads the data config, once."""
    from megaresume.data.data_config import DataConfig

    assert args.launch.data is not None
    common = {"seq_length": args.seq_length, "seed": args.seed}
    return {"data": DataConfig.of(args.launch.data), "split": args.split} | common


def _open_held_out(args: Arguments, seq_length: int, encoder: Any) -> Any:
    """The stream of --megaresume-held-out.

    Raises:
        UsageError: its images are encoded differently from those that the model is trained on.
    """
    from megaresume.batches.open import open_stream
    from megaresume.cluster.training.vision import encoders_of

    assert args.megaresume_held_out is not None
    stream = open_stream(args.megaresume_held_out, seq_length=seq_length, seed=args.seed)
    for other in encoders_of(stream.sources):
        if encoder is None or other.fingerprint != encoder.fingerprint:
            raise UsageError(
                "the held-out images are encoded differently from those of the training",
                found=f"encoder {other.fingerprint} in {args.megaresume_held_out}",
                expected="no images" if encoder is None else f"encoder {encoder.fingerprint}",
                action="prepare both with the same options of megaresume prepare",
            )
    return stream


def _vocab_size(args: Arguments, sources: Sequence[Any]) -> int:
    if args.vocab_size is not None:
        return args.vocab_size
    known: list[int] = []
    for source in sources:
        encoder = getattr(source, "encoder", None)
        if encoder is not None:
            known.append(encoder.vocab_size)
            continue
        record: Mapping[str, Any] = getattr(getattr(source, "source", source), "tokenizer", None) or {}
        if not isinstance(record.get("vocab_size"), int):
            raise UsageError(
                "the size of the vocabulary is not known",
                found=f"{source!r}, which does not say which tokenizer made it",
                expected="--vocab-size, or corpora that megaresume prepare built",
                action="--vocab-size N, where N is the tokenizer's number of token ids",
            )
        known.append(record["vocab_size"])
    return max(known)


def _tag(args: Arguments) -> str | None:
    """The checkpoint that --ckpt-step asks for."""
    return None if args.ckpt_step is None else f"global_step{args.ckpt_step}"


def _load(args: Arguments, engine: Any) -> None:
    """Resume from --load; or ensure that a fresh start overwrites nothing."""
    from megaresume.checkpoint.starts import check_fresh_start

    path = None
    if args.load is not None:
        path, _ = engine.load_checkpoint(args.load, tag=_tag(args))
    save = args.save
    if path is None and save is not None:
        on_rank_0(lambda: check_fresh_start(save, cause="--load was forgotten", load=f"--load {save}"))


if __name__ == "__main__":
    run_program(main)
