"""What a builder is asked to build, read from its attributes. They have the same names from megatron-core 0.8 on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megaresume.hosts.megatron.guard.record import Blend

#: fields of Megatron's dataset config that enter the order or the samples, and the flag that sets each.
FLAGS = {
    "random_seed": "--seed",
    "sequence_length": "--seq-length",
    "split": "--split",
    "reset_position_ids": "--reset-position-ids",
    "reset_attention_mask": "--reset-attention-mask",
    "eod_mask_loss": "--eod-mask-loss",
    "add_extra_token_to_sequence": None,
    "drop_last_partial_validation_sequence": None,
    "multiple_validation_sets": "--multiple-validation-sets",
    "inter_document_masking": "--dataloader-inter-document-masking",
    "fim_rate": "--fim-rate",
    "fim_spm_rate": "--fim-spm-rate",
    "fim_split_sample": "--fim-split-sample",
    "fim_fragment_rate": "--fim-fragment-rate",
    "fim_no_prefix": "--fim-no-prefix",
    "masking_probability": "--mask-prob",
    "short_sequence_probability": "--short-seq-prob",
    "masking_max_ngram": None,
    "masking_do_full_word": None,
    "masking_do_permutation": None,
    "masking_use_longer_ngrams": None,
    "masking_use_geometric_distribution": None,
    "classification_head": None,
    "sequence_length_encoder": "--encoder-seq-length",
    "sequence_length_decoder": "--decoder-seq-length",
}
#: properties of the tokenizer that enter the samples.
_TOKENIZER = ("eod", "pad", "vocab_size")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a builder is asked to build."""

    #: the dataset class.
    cls: Any
    settings: dict[str, Any]
    #: one blend for all splits; None: one for each, or generated data.
    blend: Blend | None
    blend_per_split: tuple[Blend | None, ...] | None
    #: samples asked for, per split; None: one epoch.
    sizes: tuple[int | None, ...]
    #: shares of the documents per split; None: the split is not built. All of each file where blends are per split.
    shares: tuple[tuple[float, float] | None, ...]

    @property
    def dataset(self) -> str:
        """Name of the dataset class."""
        return str(self.cls.__name__)

    def blend_of(self, split: int) -> Blend | None:
        """The blend of a split; None: not built, or generated."""
        if self.blend_per_split is not None:
            return self.blend_per_split[split]
        return self.blend if self.shares[split] is not None else None

    @classmethod
    def of(cls, builder: Any) -> Request:
        """Raises AttributeError, TypeError or ValueError: a builder of another kind."""
        config = builder.config
        sizes = tuple(None if size is None else int(size) for size in builder.sizes)
        per_split = config.blend_per_split if config.blend_per_split and any(config.blend_per_split) else None
        shares: tuple[tuple[float, float] | None, ...]
        if per_split is not None:
            shares = tuple(None if blend is None else (0.0, 1.0) for blend in per_split)
        else:
            shares = tuple(
                None if share is None else (float(share[0]), float(share[1])) for share in config.split_matrix
            )
        if len(sizes) != 3 or len(shares) != 3:
            raise ValueError(f"{len(sizes)} sizes and {len(shares)} splits instead of three")
        return cls(
            cls=builder.cls,
            settings=_settings(config),
            blend=_exact(config.blend) if config.blend else None,
            blend_per_split=None if per_split is None else tuple(_exact(blend) for blend in per_split),
            sizes=sizes,
            shares=shares,
        )


def _exact(blend: Sequence[Any] | None) -> Blend | None:
    if blend is None:
        return None
    paths, weights = blend
    return tuple(str(p) for p in paths), None if weights is None else tuple(float(w).hex() for w in weights)


def _settings(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in FLAGS:
        value = getattr(config, name, _ABSENT)
        if value is None or isinstance(value, bool | int | float | str):
            found[name] = value
    for name in _TOKENIZER:
        try:
            value = getattr(config.tokenizer, name)
        except Exception:  # noqa: BLE001  a tokenizer may lack any of them, and says so in its own way
            continue
        if isinstance(value, int):
            found[f"tokenizer.{name}"] = int(value)
    return found


_ABSENT = object()
