"""`Provider`: what a run of Megatron-Bridge iterates over, by Bridge's own contract for custom data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megatron.bridge.data.base import DatasetProvider

from megaresume.batches.loader import StreamLoader
from megaresume.hosts.megatron_bridge.run import Run


@dataclass
class Provider(DatasetProvider):  # type: ignore[misc]
    """Made by `attach_bridge`. Its fields are written to ``run_config.yaml``."""

    dataloader_type: Literal["single", "cyclic", "batch", "external"] | None = "external"
    #: asked by Bridge's forward step: False if the batches have a mask.
    skip_getting_attention_mask_from_dataset: bool = True

    @classmethod
    def of(cls, run: Run) -> Provider:
        """The data of a run."""
        provider = cls()
        provider._run = run  # no field: it cannot be written to a file
        return provider

    def build_datasets(self, context: Any) -> tuple[Iterator[Any], Iterator[Any] | None, None]:
        """The micro-batches of this rank to train, and to evaluate. Collective."""
        run: Run = self._run
        run.open(context.pg_collection)
        loader = run.steps.feed.loader  # type: ignore[attr-defined]
        masks = isinstance(loader, StreamLoader) and loader.dataset.attention_mask
        self.skip_getting_attention_mask_from_dataset = not masks
        return run.batches(), run.validation(context.pg_collection), None
