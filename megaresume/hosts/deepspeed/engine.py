"""Facts about a DeepSpeed engine. All use of the engine's private names is in this file.

Checked against DeepSpeed 0.16 to 0.19 (deepspeed/runtime/engine.py, deepspeed/runtime/pipe/engine.py).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaresume.checkpoint.file_errors import OtherSaveError
from megaresume.checkpoint.system import Topology
from megaresume.hosts.attach import replaced
from megaresume.hosts.frozen import entries
from megaresume.stream.errors import CheckpointError, UsageError, listed


def is_pipeline(engine: Any) -> bool:
    """Whether the engine fetches its micro-batches itself, in ``train_batch``."""
    return hasattr(engine, "train_batch") and hasattr(engine, "set_dataiterator")


def reads_batches(engine: Any) -> bool:
    """Whether this rank of a pipeline engine gets batches."""
    return bool(engine.is_first_stage() or engine.is_last_stage())


def ends_step(engine: Any) -> bool:
    """Whether ``engine.step()``, called now, changes the weights. With ``managed_gradient_accumulation: false`` (from
    DeepSpeed 0.19 on), every call does.
    """
    managed = getattr(engine, "managed_gradient_accumulation", None)
    return (managed is not None and not managed()) or bool(engine.is_gradient_accumulation_boundary())


def check_engine(engine: Any) -> None:
    """Raise a UsageError for engines and settings whose checkpoints cannot be committed."""
    _check_writer_kind(engine)
    if getattr(engine, "use_node_local_storage", lambda: False)():
        raise UsageError(
            "checkpoints on node-local storage cannot be checked by one rank",
            found="checkpoint.use_node_local_storage: true in the DeepSpeed config",
            expected="a directory that every rank sees",
            action="remove use_node_local_storage, and save to shared storage; or, with stage_to= in an object store, "
            "to a disk of each node",
        )


def check_ranks(stage: int | None, before: Topology | None, ranks: int, tag: str, *, begin_anew: str) -> None:
    """Raise a CheckpointError if DeepSpeed's own load cannot read ZeRO's optimizer state in a checkpoint.

    Args:
        stage: of ZeRO; None: not DeepSpeed.
        before: the layout of the run when it saved; None if unknown.
        ranks: current number of data-parallel ranks.
        tag: of the checkpoint.
        begin_anew: how to load only the weights.
    """
    if stage and before is not None and before.dp != ranks:
        raise CheckpointError(
            "DeepSpeed cannot load ZeRO optimizer state on a different number of ranks",
            found=f"{tag}, saved with ZeRO {before.zero_stage} on {before.dp} ranks; {ranks} now",
            expected=f"{before.dp} ranks",
            cause="the job was started on another number of nodes or GPUs",
            action=f"start on {before.dp} ranks; or {begin_anew}. With FSDP, or DeepSpeed's engine in a loop of your "
            "own under megaresume.attach, a run resumes on any number of ranks",
        )


def check_random_ltd(engine: Any) -> None:
    """Raise a UsageError if layers are wrapped for random-LTD already: DeepSpeed saves them under their names without
    the wrapper, and loads by these names."""
    wrapped = [name for name, module in engine.module.named_modules() if hasattr(module, "random_ltd_layer")]
    if wrapped:
        raise UsageError(
            "DeepSpeed cannot load into layers that are wrapped for random-LTD",
            found=f"wrapped layers: {listed(wrapped, 5)}",
            expected="the model as it was before convert_to_random_ltd: in a checkpoint the layers have these names",
            cause="convert_to_random_ltd was called before engine.load_checkpoint",
            action="call engine.load_checkpoint(...) first, and then convert_to_random_ltd(engine, LAYER)",
        )


def _check_writer_kind(engine: Any) -> None:
    """Refuse kinds of ``checkpoint.writer`` and ``datastates_ckpt`` that cannot be committed, or loaded afterwards."""
    if is_decoupled(engine) and not hasattr(engine.checkpoint_engine, "ckpt_process"):
        raise UsageError(
            "this checkpoint engine of DeepSpeed writes after save_checkpoint has returned, and does not say when it "
            "is done",
            found=type(engine.checkpoint_engine).__name__,
            expected="DeepSpeed's own decoupled writer, or none",
            action='remove datastates_ckpt from the DeepSpeed config, or use "checkpoint": {"writer": {"type": '
            '"python", "decoupled": true, "data_parallel": "replica"}} in its place',
        )
    config = getattr(getattr(engine, "_config", None), "checkpoint_config", None) or {}
    kind = (config.get("writer") or {}).get("type")
    if kind == "MOCK" or (kind == "FAST" and zero_stage(engine) < 3):
        raise UsageError(
            "what this checkpoint writer of DeepSpeed writes cannot be loaded",
            found=f"checkpoint.writer.type: {kind.lower()}, with ZeRO {zero_stage(engine)}",
            expected="files with the names that load_checkpoint reads; this one adds -0.1 to the name, or writes none",
            action='"type": "python" in checkpoint.writer, or ZeRO 3',
        )


def is_decoupled(engine: Any) -> bool:
    """Whether checkpoints are written after ``save_checkpoint`` has returned."""
    writer = getattr(engine, "checkpoint_engine", None)
    return writer is not None and bool(getattr(writer, "is_decoupled", lambda: False)())


def has_writer(engine: Any) -> bool:
    """Whether ``checkpoint.writer`` is set: one of DeepSpeed's newer checkpoint engines."""
    config = getattr(getattr(engine, "_config", None), "checkpoint_config", None) or {}
    return bool(config.get("writer"))


def data_size(engine: Any) -> int:
    """The number of data-parallel ranks: those that get different samples."""
    return int(engine.dp_world_size)


def data_rank(engine: Any) -> int:
    """This rank's number among the data-parallel ranks."""
    return dist.get_rank(group=engine.data_parallel_group)


def partitions(engine: Any) -> int:
    """The number of ranks over which ZeRO divides the optimizer state."""
    return int(engine.seq_dp_world_size)


def pipeline_stages(engine: Any) -> int:
    """The number of pipeline stages; 1 without a pipeline."""
    return int(engine.grid.pipe_parallel_size) if is_pipeline(engine) else 1


def loads_universal(engine: Any) -> bool:
    """Whether ``checkpoint.load_universal`` is set."""
    return bool(engine.load_universal_checkpoint())


def loads_own_zero_files(engine: Any, before: Topology) -> bool:
    """Whether each rank reads only its own part of ZeRO's state, if a checkpoint was saved in this layout."""
    now = topology(engine)
    names = ("world_size", "dp", "tp", "pp", "cp", "zero_stage")
    is_same = all(getattr(before, name) == getattr(now, name) for name in names)
    return is_same and not loads_universal(engine) and not engine.zero_elastic_checkpoint()


def as_universal(engine: Any) -> contextlib.AbstractContextManager[None]:
    """A context in which ``load_checkpoint`` treats a tag as a universal checkpoint; the config is not changed."""
    return replaced(engine._config, load_universal_checkpoint=True)


def zero_stage(engine: Any) -> int:
    """ZeRO's stage, 0 to 3."""
    return int(engine.zero_optimization_stage())


def model_file(engine: Any, tag_dir: Path) -> Path:
    """The file of a universal checkpoint with this rank's module."""
    with as_universal(engine):
        return Path(engine._get_all_ckpt_names(str(tag_dir.parent), tag_dir.name)[0])


def saved_names(engine: Any, weights: Mapping[str, Any], *, excludes: bool) -> set[str]:
    """The names of what ``save_checkpoint`` saves: see `FrozenWeights.note`.

    Args:
        weights: the module's, under the name "0": see `weights_of`.
        excludes: its ``exclude_frozen_parameters``.
    """
    stage = zero_stage(engine)
    frozen = {key for key, one in weights.items() if isinstance(one, torch.nn.Parameter) and not one.requires_grad}
    # Layers by themselves, or ZeRO's parts, whatever state_dict returns; of stage 2, those of frozen ones.
    is_whole = is_pipeline(engine) or stage > 2
    there = set(weights) if is_whole else set(entries({"0": engine.module.state_dict()}))
    if excludes:
        return there - frozen
    return there | frozen if stage == 2 else there


def set_batch_size(engine: Any, size: int) -> None:
    """Change the global batch size (samples) between two steps, including what DeepSpeed leaves unchanged."""
    engine.set_train_batch_size(size)
    if not is_pipeline(engine):
        # The engine steps when its micro-step counter is a multiple of the *new* number of micro-steps; without this,
        # the first step with another size would be cut short.
        engine.micro_steps = 0
    if hasattr(engine.optimizer, "gradient_accumulation_steps"):
        engine.optimizer.gradient_accumulation_steps = engine.gradient_accumulation_steps()


def forget_gradients(engine: Any) -> None:
    """Clear what an unfinished step has left; DeepSpeed's load and its ``zero_grad`` do not clear everything."""
    if is_pipeline(engine) or engine.optimizer is None:
        return
    optimizer = engine.optimizer
    engine.micro_steps = 0
    optimizer.zero_grad()
    if hasattr(optimizer, "clear_hp_grads"):  # bfloat16 without ZeRO: the float32 sums
        optimizer.clear_hp_grads()
    if zero_stage(engine) in (1, 2):  # as after its constructor
        optimizer.micro_step_id = -1
        optimizer.averaged_gradients, optimizer.all_grad_tensors = {}, {}


#: key for the id of the save in a file of optimizer state. For the weights' file, the client state has it.
_SAVE = "megaresume_save"


def stamped(engine: Any, save_id: str) -> contextlib.AbstractContextManager[None]:
    """A context in which ``save_checkpoint`` adds the id of the save to every file of optimizer state."""
    write = engine.checkpoint_engine.save

    @functools.wraps(write)
    def save(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(state_dict, dict) and "optimizer_state_dict" in state_dict:
            state_dict = {**state_dict, _SAVE: save_id}
        return write(state_dict, *args, **kwargs)

    return replaced(engine.checkpoint_engine, save=save)


def checked(engine: Any, save_id: str | None) -> contextlib.AbstractContextManager[None]:
    """A context in which ``load_checkpoint`` raises an `OtherSaveError` for a file stamped by another save, so that an
    intact file of another step is detected without checksums. None if the save is unknown.
    """
    read = engine.checkpoint_engine.load

    @functools.wraps(read)
    def load(path: Any, *args: Any, **kwargs: Any) -> Any:
        found = read(path, *args, **kwargs)
        of = found.get(_SAVE) if isinstance(found, dict) else None
        if save_id is not None and of is not None and of != save_id:
            raise OtherSaveError(f"{os.path.basename(path)} was written by save {of}, and the checkpoint by {save_id}")
        return found

    return replaced(engine.checkpoint_engine, load=load)


@contextlib.contextmanager
def _wrapped(function: Callable[..., Any], *places: tuple[Any, str]) -> Iterator[None]:
    """Within it, these methods, by owner and name, go through a function, which is given the method before its
    arguments."""
    with contextlib.ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(replaced(owner, **{name: functools.partial(function, getattr(owner, name))}))
        yield


@contextlib.contextmanager
def failing_late(engine: Any) -> Iterator[list[Exception]]:
    """A context in which ``save_checkpoint`` does not raise on a rank that cannot write a file, as that would leave the
    others in subsequent collectives. Such a rank writes nothing more, and the error is in the yielded list.
    """
    errors: list[Exception] = []

    def late(write: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not errors:
            try:
                return write(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  raised later, on every rank
                errors.append(error)
        return None

    files = engine.checkpoint_engine
    with _wrapped(late, (files, "save"), (files, "makedirs"), (engine, "_copy_recovery_script")):
        yield errors


@contextlib.contextmanager
def raising_last(engine: Any, *writers: tuple[Any, str]) -> Iterator[None]:
    """A context in which a rank that cannot write a file continues to the collectives where the others wait for it; the
    first error is raised at the end.

    Args:
        engine: writes, see `failing_late`; None: another backend.
        writers: other methods, by owner and name, that write files of this rank before a collective.
    """
    with contextlib.nullcontext(list[Exception]()) if engine is None else failing_late(engine) as errors:

        def late(write: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            try:
                write(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  raised at the end
                errors.append(error)

        with _wrapped(late, *writers):
            yield
    if errors:
        raise errors[0]


@contextlib.contextmanager
def loading(engine: Any, gate: Callable[[], None]) -> Iterator[None]:
    """A context in which ``load_checkpoint`` calls ``gate`` after a rank has read its own files and before a
    collective; a rank that cannot read a file never gets there.
    """

    def after(collective: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        gate()
        return collective(*args, **kwargs)

    places = (
        (engine, "load_module_state_dict"),  # ZeRO 3: gathers parameters when only weights are loaded
        (engine.module, "_synchronize_tied_weights"),  # pipelines: broadcasts
        (engine.optimizer, "checkpoint_event_epilogue"),  # ZeRO 3: gathers small parameters
        (engine.optimizer, "update_lp_params"),  # ZeRO 1 and 2, universal: gathers weights
    )
    with _wrapped(after, *(place for place in places if hasattr(*place))):
        yield


def topology(engine: Any) -> Topology:
    """The layout of the run, for records, without its workers."""
    world = dist.get_world_size()
    dp, sp = data_size(engine), partitions(engine) // data_size(engine)
    pp = pipeline_stages(engine)
    tp = int(engine.grid.model_parallel_size if is_pipeline(engine) else engine.mp_world_size)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return Topology(
        world_size=world,
        dp=dp,
        tp=tp,
        pp=pp,
        cp=sp,
        micro_batch_size=int(engine.train_micro_batch_size_per_gpu()),
        global_batch_size=int(engine.train_batch_size()),
        zero_stage=zero_stage(engine),
        nodes=world // local if local and world % local == 0 else None,
    )


def expected_files(engine: Any, save_dir: str, tag: str) -> list[str]:
    """The files that this rank writes into the tag directory, relative to it.

    Model states: one per model-parallel rank, by data-parallel rank 0 (ZeRO 3: by every rank). Optimizer states: one
    per rank from ZeRO 1 on. Pipelines: also one per layer. Files of MoE experts and of tensors offloaded to NVMe are
    not among them; the manifest lists those that exist.
    """
    paths: list[str] = []
    if engine.save_non_zero_checkpoint:
        paths.append(engine._get_ckpt_name(save_dir, tag))
    if engine.save_zero_checkpoint:
        paths.append(engine._get_zero_ckpt_name(save_dir, tag))
    if is_pipeline(engine):
        paths += _layer_files(engine.module, os.path.join(save_dir, tag))
    tag_dir = Path(save_dir, tag)
    return [Path(path).relative_to(tag_dir).as_posix() for path in paths]


def _layer_files(module: Any, tag_dir: str) -> list[str]:
    """The files of layers, as in ``PipelineModule.save_state_dict``."""
    rank, size = module._grid.data_parallel_id, module._grid.data_parallel_size
    layers = list(module.forward_funcs)
    if module.checkpoint_parallel_write_pipeline:
        from deepspeed.runtime import utils  # deferred: DeepSpeed takes seconds to import

        bounds = utils.partition_uniform(len(layers), size)
        first, stop = bounds[rank], bounds[rank + 1]
    else:
        first, stop = (0, len(layers)) if rank == 0 else (0, 0)
    return [
        module.ckpt_layer_path(tag_dir, index) for index in range(first, stop) if hasattr(layers[index], "state_dict")
    ]
