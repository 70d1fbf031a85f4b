"""Weights that have other names in a checkpoint of the Trainer's than in its model.

Transformers saves many models, such as Mixtral, Qwen3-MoE and Swin, under the names that their weights have on the Hub:
each expert by itself, where the model has all of them in one tensor. Only ``from_pretrained`` translates them back. The
Trainer loads by name: it warns, and trains on with what the model held before.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from megaresume.checkpoint.generators import kept
from megaresume.checkpoint.ranks import on_all_ranks
from megaresume.hosts.attach import replaced
from megaresume.hosts.trainer import Hook
from megaresume.stream.errors import CheckpointError

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
        """Load weights that were not found by their names. Raises CheckpointError: see `load_missing`."""
        path = Path(self._loading or self._trainer.state.best_model_checkpoint)
        if not on_all_ranks(lambda: load_missing(self._trainer.model, path, result.missing_keys)):
            warn(result)


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
