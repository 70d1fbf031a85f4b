"""Weights that a checkpoint of the Trainer's lacks, or has under other names than its model.

`RenamedWeights`: transformers saves many models, such as Mixtral, Qwen3-MoE and Swin, under the names that they have on
the Hub: each expert by itself, where the model has all of them in one tensor. Only ``from_pretrained`` translates them
back. Models that wrap another one, such as GLiNER's and FlagEmbedding's, save that one alone, under its own names. The
Trainer loads by name: it warns, and trains on with what the model held before.

`frozen_of`: of a model of PEFT's, a checkpoint holds the adapters alone; reference models and teachers are in none.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from megaresume.checkpoint.generators import kept
from megaresume.checkpoint.ranks import on_all_ranks
from megaresume.hosts.attach import replaced
from megaresume.hosts.frozen import FrozenWeights, below_adapters, weights_of
from megaresume.hosts.trainer import Hook
from megaresume.stream.errors import CheckpointError, listed

log = logging.getLogger(__name__)


class RenamedWeights:
    """What is hooked on a Trainer, so that it loads all weights of a checkpoint.

    Args:
        trainer: transformers' Trainer, or an instance of a derived class.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        #: the checkpoint whose weights are being loaded; None: the best one, at the end of the run.
        self._loading: str | None = None
        #: the module that they are loaded into; None: the Trainer's model.
        self._into: Any = None

    def hooks(self) -> list[Hook]:
        """The methods of the Trainer, and what to call around them."""
        return [
            (self._trainer, "_load_from_checkpoint", self._load_from_checkpoint),
            (self._trainer, "_issue_warnings_after_load", self._issue_warnings_after_load),
        ]

    def _load_from_checkpoint(self, load: Any, path: str, *args: Any, **kwargs: Any) -> None:
        """Load the weights, and note from where."""
        with replaced(self, _loading=path):
            load(path, *args, **kwargs)

    def _issue_warnings_after_load(self, warn: Any, result: Any) -> None:
        """Load weights that were not found by their names. Raises CheckpointError: see `load_missing`, `check_rest`."""
        path = Path(self._loading or self._trainer.state.best_model_checkpoint)
        model = self._trainer.model if self._into is None else self._into
        if (inner := wrapped_in(model, result.missing_keys, result.unexpected_keys)) is not None:
            self._load_into(model.get_submodule(inner), path)
            rest = [name for name in result.missing_keys if not name.startswith(f"{inner}.")]
            on_all_ranks(lambda: check_rest(model, path, rest))
        elif not on_all_ranks(lambda: load_missing(model, path, result.missing_keys)) and hasattr(
            self._trainer.model, "_keys_to_ignore_on_save"
        ):  # a model of transformers, which is asked for this
            warn(result)

    def _load_into(self, module: Any, path: Path) -> None:
        from transformers import Trainer

        with replaced(self, _loading=str(path), _into=module):
            Trainer._load_from_checkpoint(self._trainer, str(path), module)


def frozen_of(trainer: Any, way_out: str = "") -> FrozenWeights:
    """The weights below a Trainer's adapters, and those of its reference model and teacher.

    Args:
        trainer: transformers' Trainer, or an instance of a derived class.
        way_out: how to go on with others, as a sentence for the error.
    """

    def weights() -> dict[str, torch.Tensor]:
        return {**dict(below_adapters(trainer.model)), **weights_of(_others(trainer))}

    return FrozenWeights(weights, action=_AS_THEN + way_out)


def saved_or_trained(trainer: Any, weights: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of those that its checkpoints hold, or that change: see `FrozenWeights.note`, `check_adapter`."""
    trained = {id(one) for _, one in below_adapters(trainer.model) if one.requires_grad}
    return [name for name, one in weights.items() if id(one) in trained]


class FrozenInState:
    """Hooked on a Trainer without a session: records frozen weights in trainer_state.json, see `frozen_of`."""

    #: the key in ``stateful_callbacks``.
    KEY = "megaresume.frozen"

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._frozen = trainer, frozen_of(trainer)
        #: of the checkpoint that was loaded; None: there is none, or it has none.
        self._saved: Mapping[str, Any] | None = None
        self._has_looked = False

    def hooks(self) -> list[Hook]:
        """The methods of the Trainer, and what to call around them."""
        return [
            (self._trainer, "_load_callback_state", self._load_callback_state),
            (self._trainer, "_run_epoch", self._run_epoch),
        ]

    def _load_callback_state(self, load: Any) -> None:
        """Take what the checkpoint says, for which the Trainer would look for a callback."""
        self._saved = self._trainer.state.stateful_callbacks.pop(self.KEY, None)
        load()

    def _run_epoch(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        """Before the first step, when everything is loaded, compare, and note what checkpoints record."""
        if not self._has_looked:
            self._has_looked = True
            if self._saved is not None:
                self._frozen.check(self._saved)
            now = self._frozen.record(lambda weights: saved_or_trained(self._trainer, weights))
            if now is not None:
                self._trainer.state.stateful_callbacks[self.KEY] = now
        return run(*args, **kwargs)


_AS_THEN = (
    "make the models as when the run saved: from_pretrained with the same revision, dtype and quantization, and "
    "transformers.set_seed before it and before get_peft_model"
)


def _others(trainer: Any) -> dict[str, torch.nn.Module]:
    """The models of a Trainer that no checkpoint of its holds."""
    models = {name: getattr(trainer, name, None) for name in ("ref_model", "teacher_model")}
    return {name: one for name, one in models.items() if isinstance(one, torch.nn.Module) and one is not trainer.model}


def check_adapter(trainer: Any, tag_dir: Path) -> None:
    """Check that a checkpoint of a model of PEFT's has all weights that are trained, after it is written.

    Raises:
        CheckpointError: it lacks some that are not an adapter's, or those of a network that makes prompts.
    """
    file = tag_dir / "adapter_model.safetensors"
    if not file.exists():  # DeepSpeed and FSDP save what is trained by its names in the model
        return
    from safetensors import safe_open

    with safe_open(file, "pt") as saved:
        there = set(saved.keys())
    trained = {id(one) for group in trainer.optimizer.param_groups for one in group["params"]}
    named = [(name, one) for name, one in below_adapters(trainer.model) if name not in there]
    prompts = getattr(trainer.model, "prompt_encoder", None) or {}
    made = [
        (f"prompt_encoder.{adapter}.{name}", one)
        for adapter, encoder in prompts.items()
        for name, one in encoder.named_parameters()
        if name != "embedding.weight" and name not in there
    ]
    if lost := [name for name, one in (*named, *made) if id(one) in trained and one.requires_grad]:
        raise CheckpointError(
            "the checkpoint lacks weights that are trained",
            found=f"{file}, without {listed(lost, 1, separator=' ')}",
            expected="every parameter of the model that requires a gradient",
            cause="PEFT saves adapters, and of prompts the result alone, not the network that makes them; every resume "
            "would start the others afresh",
            action="PromptTuningConfig, or PrefixTuningConfig without prefix_projection"
            if lost[0].startswith("prompt_encoder.")
            else "name their modules in LoraConfig(modules_to_save=[...]) in place of requires_grad_(True); or leave "
            "them frozen",
        )


def load_missing(model: Any, tag_dir: Path, missing: Iterable[str]) -> bool:
    """Load the weights of a checkpoint by the model's ``from_pretrained``, if some were not found by their names.

    Args:
        model: transformers' or another one, into which the Trainer has loaded the checkpoint.
        tag_dir: the checkpoint.
        missing: the names that it did not find there.

    Returns:
        whether there were any that are trained; those of tied weights are not, as they are there by another name.

    Raises:
        CheckpointError: ``from_pretrained`` does not find them either.
    """
    if not (lost := _untouched(model, missing)):
        return False
    try:
        with kept():  # it initializes a model
            whole, info = type(model).from_pretrained(
                tag_dir, config=copy.deepcopy(model.config), dtype=_dtype(model), output_loading_info=True
            )
    except Exception as error:  # of any model's class
        raise _not_found(tag_dir, lost, f"{type(error).__name__}: {error}") from error
    model.load_state_dict(whole.state_dict(), strict=False)
    if still := _untouched(model, info["missing_keys"]):
        raise _not_found(tag_dir, still, f"{type(model).__name__}.from_pretrained does not find them")
    log.info("megaresume: %d weights have other names in %s: loaded by from_pretrained", len(lost), tag_dir.name)
    return True


def wrapped_in(model: Any, missing: Iterable[str], unexpected: Iterable[str]) -> str | None:
    """The name of the module that a checkpoint holds, if it was saved by its own names and not those of ``model``.

    Args:
        model: one that wraps another model.
        missing, unexpected: the names that it has and the checkpoint lacks, and the other way round.

    Returns:
        None if it is none of them, or may be any of several.
    """
    absent, there = set(missing), set(unexpected)
    found = [name for name, _ in model.named_children() if there and {f"{name}.{one}" for one in there} <= absent]
    return found[0] if len(found) == 1 else None


def check_rest(model: Any, tag_dir: Path, missing: Iterable[str]) -> None:
    """Refuse a checkpoint without weights that are trained, beside the module that it holds: see `wrapped_in`.

    Raises:
        CheckpointError: it lacks some of these.
    """
    if lost := _untouched(model, missing):
        raise _not_found(tag_dir, lost, f"{type(model).__name__} saves the model within it alone")


def _untouched(model: Any, missing: Iterable[str]) -> list[str]:
    """Of the names that were not found, those of parameters that are trained, and were not loaded by another name."""
    absent = set(missing)
    named = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(parameter) for name, parameter in named.items() if name not in absent}
    return [name for name, one in named.items() if name in absent and one.requires_grad and id(one) not in loaded]


def _dtype(model: Any) -> torch.dtype:
    """One that holds every parameter without loss: theirs, or float32 if they differ."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _not_found(tag_dir: Path, names: list[str], reason: str) -> CheckpointError:
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return CheckpointError(
        "the checkpoint lacks weights that are trained",
        found=f"{tag_dir}, without {names[0]}{others}",
        expected="every parameter of the model that requires a gradient",
        cause=f"the model was made otherwise, or its save_pretrained writes other names: {reason:.300}",
        action="make the model as it was; or, if they need not be trained, give them requires_grad_(False)",
    )
