"""Hooks around Megatron's ``build_train_valid_test_data_iterators``.

By then the checkpoint is loaded, and ``args.consumed_train_samples`` is where training resumes. All ranks come here,
even those that read no data, so whatever concerns all of them is settled here:

    stream   open the streams (rank 0 first: it leaves fingerprints for the others) -> resume from the state
             -> check that every replica has the same -> Megatron's own function, with our provider
    guard    Megatron's own function, with the script's provider under guard -> check that every replica has the same
    loaders  Megatron's own function, with the script's provider, which returns loaders (``loaders.py``)

With a virtual pipeline it is called once per chunk; the chunks of a process share its streams.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import xxhash

from megaresume.checkpoint.ranks import gather, is_rank_0, known_to_all, on_all_ranks, on_rank_0, rank
from megaresume.checkpoint.records.envelope import stream_of
from megaresume.checkpoint.records.rank_log import RankLog, images_of
from megaresume.data.source import is_document_source
from megaresume.data.spans import has_spans
from megaresume.hosts.megatron.calls import check_load, is_built
from megaresume.hosts.megatron.checks import check_flags
from megaresume.hosts.megatron.host import MegatronHost, megatron_host
from megaresume.hosts.megatron.load_rules import check_mode
from megaresume.hosts.megatron.loaders import build_with_loaders
from megaresume.hosts.megatron.project import coordinates, data_parallel, end_of_document
from megaresume.hosts.megatron.provider import form_of, stream_provider, warnings_of
from megaresume.hosts.megatron.samples import HASH_KEY, SAMPLE_KEY, SampleForm
from megaresume.hosts.megatron.streams import StreamOrder
from megaresume.stream.errors import StateError
from megaresume.stream.source import same_corpora

log = logging.getLogger(__name__)


def around_build_data_iterators(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook on Megatron's ``build_train_valid_test_data_iterators(provider)`` that brings in our data or our guard.

    Raises, on every rank:
        StateError: training continues, and a rank has no state to resume from, or a different one than rank 0.
        UsageError, ConfigError, CorpusError, SetupError: see `check_flags`, `open_streams` and `form_of`.
        CheckpointError, SetupError: another job writes to ``--save``, or a node does not see it (`Session.start`).
    """

    def build(provider: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        current = megatron_host()
        if current.settings.mode == "off":
            return original(provider, *args, **kwargs)
        # validate_args is not always called before this (YAML configs, bigscience).
        on_all_ranks(lambda: check_flags(current.args, current.settings, current.project))
        current.start()
        on_all_ranks(lambda: check_load(current))
        current.proof.is_building = True
        ours = _guarded if current.settings.mode == "guard" else _streamed
        if current.settings.mode == "guard" and getattr(current.args, "dataloader_type", None) == "external":
            ours = build_with_loaders
        return is_built(current, ours(current, lambda given: original(given, *args, **kwargs), provider))

    return build


def _streamed(current: MegatronHost, original: Callable[..., Any], provider: Callable[..., Any]) -> Any:
    from megaresume.hosts.megatron.checkpointing import after_data_is_built

    there = current.order
    if isinstance(there, StreamOrder):  # another chunk or phase of the same run
        return _build(current, original, there, _form(current, there), provider)
    _check_loaded(current)
    order = _begin(current)
    form = on_all_ranks(lambda: _form(current, order))
    if is_rank_0():
        warnings = warnings_of(current.args, form, order.stream.config.packing)
        for warning in (*warnings, *same_corpora(order.stream.fingerprints)):
            print(f"megaresume: WARNING: {warning}", flush=True)
    _check_streams(current, order)
    current.order = order
    after_data_is_built(current)
    order.launch = on_rank_0(time.time_ns)
    result = _build(current, original, order, form, provider)
    order.follow(current.args)  # after the workers were started: a fork is safest with a single thread
    return result


def _build(
    current: MegatronHost,
    original: Callable[..., Any],
    order: StreamOrder,
    form: SampleForm,
    provider: Callable[..., Any],
) -> Any:
    """Megatron's own function with our provider, plus a log of what is handed out, if asked for."""
    result = original(stream_provider(current.project, current.args, order, form, provider))
    chunk, order.chunks = order.chunks, order.chunks + 1
    if current.settings.log_samples is None:
        return result
    return on_all_ranks(lambda: logged(current, order, form, result, chunk=chunk))


def _guarded(current: MegatronHost, original: Callable[..., Any], provider: Callable[..., Any]) -> Any:
    from megaresume.hosts.megatron.checkpointing import after_data_is_built
    from megaresume.hosts.megatron.guard.order import guarded, shared

    is_first = current.order is None
    if is_first:
        _check_loaded(current)
    result = original(guarded(current, provider))
    shared(current)
    if is_first:
        after_data_is_built(current)
    return result


def _begin(current: MegatronHost) -> StreamOrder:
    from megaresume.hosts.megatron.arguments import schedule_from_args, skip_of
    from megaresume.hosts.megatron.streams import Streams, open_streams

    args = current.args
    opened: list[Streams] = []
    state = None if current.loaded is None else stream_of(current.loaded.state)

    def read() -> None:
        if not opened:
            opened.append(open_streams(args, current.settings.data, current.settings.on_change, state))
            _ = opened[0].train.fingerprints

    on_rank_0(read)
    on_all_ranks(read)

    def begin() -> StreamOrder:
        return StreamOrder(
            opened[0],
            saved=state,
            position=int(args.consumed_train_samples),
            iteration=int(args.iteration),
            schedule=schedule_from_args(args, current.project, int(args.consumed_train_samples)),
            skip=skip_of(args, current.settings, from_0=is_megatron_lm and not current.project.at_least(0, 17)),
            end=lambda schedule: int(getattr(args, "train_samples", None) or schedule.after(0, int(args.train_iters))),
            balance=current.settings.balance,
        )

    is_megatron_lm = current.project.kind == "megatron-lm"
    order = on_all_ranks(begin)
    # We handle these now: Megatron's own loop would also skip the steps that took their place.
    for name, nothing in (("iterations_to_skip", []), ("skip_train_iteration_range", None)):
        if getattr(args, name, None):
            setattr(args, name, nothing)
    return order


def _form(current: MegatronHost, order: StreamOrder) -> SampleForm:
    streams = [stream for stream in (order.streams.train, order.streams.valid, order.streams.test) if stream]
    named = [(config, source) for s in streams for config, source in zip(s.config.sources, s.sources, strict=True)]
    config = order.stream.config
    return form_of(
        current.args,
        config.packing,
        text=current.project.kind != "megatron-lm",
        eod=lambda: end_of_document(current.project),
        spans=list(dict.fromkeys(config.label for config, source in named if has_spans(source))),
        fillers=[source.label for source, fills in zip(config.sources, config.fillers, strict=True) if fills],
        images=any(is_document_source(source) for source in order.stream.sources),
        logged=current.settings.log_samples is not None,
    )


def _check_loaded(current: MegatronHost) -> None:
    """Refuse a mode that does not match the checkpoint, or a rank that was given a different state than rank 0."""
    args, loaded, mode = current.args, current.loaded, current.settings.mode

    on_all_ranks(lambda: check_mode(None if loaded is None else loaded.kind, mode))
    state = "none" if loaded is None else f"{loaded.kind} state at sample {loaded.samples}, {_hash(loaded.to_dict())}"
    facts = {"iteration": int(args.iteration), "sample": int(args.consumed_train_samples), "restored state": state}
    check_replicas(gather((coordinates(current.project), facts)))


def _check_streams(current: MegatronHost, order: StreamOrder) -> None:
    stream = order.stream
    corpora = {name: asdict(print_) for name, print_ in stream.fingerprints.items()}
    facts = {
        "sample": order.position,
        "data config": _hash(stream.config.to_dict()),
        "corpora": _hash(corpora),
        "digest": on_all_ranks(lambda: stream.digest_at(order.position)),
        "balance": str(order.balance),
    }
    check_replicas(gather((coordinates(current.project), facts)))


def check_replicas(replicas: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Raise a StateError unless all ranks have the same facts: the first and last pipeline stages, context-parallel
    ranks and virtual-pipeline chunks read independently, and with other data one would feed tokens to wrong labels.

    Args:
        replicas: (coordinates, facts) of every rank, in rank order.
    """
    facts_of_0 = replicas[0][1]
    for number, (where, facts) in enumerate(replicas):
        for name, value in facts.items():
            if value == facts_of_0[name]:
                continue
            odd, normal = (number, where, value), (0, replicas[0][0], facts_of_0[name])
            if name == "restored state" and facts_of_0[name] == "none":
                odd, normal = normal, odd
            raise known_to_all(
                StateError(
                    f"rank {odd[0]} ({odd[1]}) differs from the others in its {name}",
                    found=f"rank {odd[0]} ({odd[1]}): {name} {odd[2]}",
                    expected=f"{name} {normal[2]}, as rank {normal[0]} ({normal[1]})",
                    cause="the ranks have read different checkpoints or corpora: a directory that is not shared, or "
                    "an old copy of it",
                    action="mount the same --load directory and the same corpora on every node",
                )
            )


def _hash(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())


# ``--megaresume-log-samples DIR``: every process that is handed training batches records them
#
#     DataLoader -> [here] -> RerunDataIterator -> get_batch
#
# Below Megatron's own replay, so that a rerun step is recorded once; and above the workers, so that what was read
# ahead and lost is not recorded. Items carry their numbers and identities; ``get_batch`` never sees those.


def logged(current: MegatronHost, order: StreamOrder, form: SampleForm, iterators: Any, *, chunk: int) -> Any:
    """Add a log to the training iterator that Megatron's ``build_train_valid_test_data_iterators`` returned.

    Args:
        current: the host, whose settings name the directory.
        order: the training stream.
        form: the form of the items.
        iterators: (train, valid, test); None if this rank reads no data.
        chunk: the chunk of the virtual pipeline.

    Raises:
        SetupError: the log cannot be written.
    """
    directory = current.settings.log_samples
    train, *others = iterators
    if directory is None or train is None:
        return iterators
    log = RankLog(directory, rank=rank(), launch=order.launch, chunk=chunk)
    inner = getattr(train, "iterable", None)
    batches = _Logged(train if inner is None else inner, current, order, form, log)
    if inner is None:
        train = batches
    else:
        train.iterable = batches
    return (train, *others)


class _Logged:
    """Passes batches on, and writes a line whenever a step is complete."""

    def __init__(self, batches: Any, current: MegatronHost, order: StreamOrder, form: SampleForm, log: RankLog) -> None:
        self._batches: Iterator[dict[str, Any]] = iter(batches)
        self._order, self._form, self._log = order, form, log
        dp_rank, size = data_parallel(current.project)
        self._share = size
        args = current.args
        # Steps in all: those already done, and those of this process.
        self._step, self._sample = int(args.iteration), order.position
        log.start(
            step=self._step,
            samples=order.position,
            dp_rank=dp_rank,
            dp=size,
            micro_batch_size=int(args.micro_batch_size),
            pad_id=form.eod if form.text and form.eod is not None else 0,
            digest=order.stream.digest_at(order.position),
            balance=order.balance,
        )

    def __iter__(self) -> _Logged:
        return self

    def __next__(self) -> dict[str, Any]:
        batch = next(self._batches)
        take = batch.__getitem__ if self._form.identity else batch.pop
        samples, hashes = take(SAMPLE_KEY).numpy(), take(HASH_KEY).numpy()
        tokens = batch["text"][:, :-1] if self._form.text else batch["tokens"]
        masks = np.asarray(batch["loss_mask"]) if self._form.masks_of_the_plan else None
        self._log.add(samples, hashes, np.asarray(tokens), images_of(batch), masks)
        size = self._order.schedule.size_at(self._sample)
        if self._log.noted * self._share >= size:
            self._step, self._sample = self._step + 1, self._sample + size
            self._log.end_step(self._step)
        return batch
