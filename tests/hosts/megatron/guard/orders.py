"""Build datasets with the real megatron-core, with and without guard, and say in which order the samples come.

A program as well (``orders.py SPEC.json RESULT.json``), so that other versions of megatron-core and several ranks can
be tried in processes of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import socket
import sys
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np


@dataclass(kw_only=True)
class Spec:
    """One start of a run."""

    paths: list[str] | None = None
    weights: list[float] | None = None
    per_split: list[Any] | None = None
    sizes: list[int | None] = field(default_factory=lambda: [300, 20, 20])
    split: str = "80,10,10"
    seed: int = 1234
    seq_length: int = 32
    cache: str | None = None
    eod: int = 0
    #: further fields of the dataset config.
    config: dict[str, Any] = field(default_factory=dict)
    guard: bool = True
    #: what a checkpoint holds; None: nothing loaded.
    loaded: dict[str, Any] | None = None
    samples: int = 0
    accept: list[str] = field(default_factory=list)
    args: dict[str, Any] = field(default_factory=dict)
    #: how often the provider is called: virtual-pipeline chunks.
    chunks: int = 1
    dataset: str = "GPTDataset"
    #: ranks that build, per chunk; None: all.
    builds_on: list[list[int]] | None = None


#: of the dataset config; required.
FLAGS = {
    "create_attention_mask": False,
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "eod_mask_loss": False,
}


#: the same of datasets that mask words.
MASKING = {
    "masking_probability": 0.15,
    "short_sequence_probability": 0.1,
    "masking_max_ngram": 3,
    "masking_do_full_word": False,
    "masking_do_permutation": False,
    "masking_use_longer_ngrams": False,
    "masking_use_geometric_distribution": False,
    "classification_head": False,
}


def dataset_class(name: str) -> Any:
    """A dataset class of megatron-core, or one made in the way of those in Megatron's training package."""
    from megatron.core.datasets import gpt_dataset

    class WithRandomItems(gpt_dataset.GPTDataset):
        """As ``GPTFIMDataset``: one generator per process, drawn from with every item."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.np_rng = np.random.RandomState(seed=self.config.random_seed)

    class WithoutIndex(gpt_dataset.MegatronDataset):
        """As ``SFTDataset``: document by document, over and over."""

        numel_low_level_dataset = staticmethod(gpt_dataset.GPTDataset.numel_low_level_dataset)
        build_low_level_dataset = staticmethod(gpt_dataset.GPTDataset.build_low_level_dataset)

        def __len__(self) -> int:
            return self.num_samples

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"tokens": self.dataset.get(int(self.indices[index % len(self.indices)]))}

    class OfLines(WithoutIndex):
        """As ``SFTDataset``: each line of a JSON lines file is a document."""

        @staticmethod
        def numel_low_level_dataset(lines: list[Any]) -> int:
            return len(lines)

        @staticmethod
        def build_low_level_dataset(path: str, _: Any) -> list[Any]:
            return [json.loads(line) for line in Path(path).read_text().splitlines()]

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"tokens": self.dataset[int(self.indices[index % len(self.indices)])]}

    if name == "BERT":
        from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset

        return BERTMaskedWordPieceDataset
    own = {"WithRandomItems": WithRandomItems, "WithoutIndex": WithoutIndex, "OfLines": OfLines}
    return own.get(name) or getattr(gpt_dataset, name)


class Tokenizer:
    """What the datasets ask of one."""

    vocab_size = 1000
    inv_vocab: ClassVar = {i: str(i) for i in range(1000)}
    unique_identifiers: ClassVar = OrderedDict({"class": "Tokenizer"})

    def __init__(self, eod: int) -> None:
        self.eod = eod


def run(spec: Spec) -> dict[str, Any]:
    """Build once. Returns the samples of each split in order (hashes), the payload, and what was printed."""
    init_process_group()
    from megatron.core.datasets import gpt_dataset
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    from megaresume.hosts.megatron.arguments import Settings
    from megaresume.hosts.megatron.guard.build import around_builder_build
    from megaresume.hosts.megatron.guard.order import guarded
    from megaresume.hosts.megatron.host import MegatronHost
    from megaresume.hosts.megatron.project import Project
    from tests.hosts.megatron.guard.loads import order_loaded

    # Generated data has 100,000 documents; these tests need a few.
    gpt_dataset.MockGPTLowLevelDataset.size = 300

    class Builder(BlendedMegatronDatasetBuilder):
        build = around_builder_build(BlendedMegatronDatasetBuilder.build)

    host = MegatronHost(
        Project(kind="megatron-lm", root=Path(), version="0", modules={}),
        SimpleNamespace(consumed_train_samples=spec.samples, **spec.args),
        Settings(mode="guard", accept=tuple(spec.accept or ())),
    )
    if spec.loaded is not None:
        host.session.loaded = order_loaded(spec.loaded, spec.samples)

    def provider(sizes: list[int | None], vp_stage: int | None = None) -> Any:
        blend = None if spec.paths is None else (spec.paths, spec.weights)
        fields: dict[str, Any] = FLAGS
        config_class = gpt_dataset.GPTDatasetConfig
        if spec.dataset == "BERT":
            from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDatasetConfig

            config_class, fields = BERTMaskedWordPieceDatasetConfig, MASKING
        config = config_class(
            random_seed=spec.seed,
            sequence_length=spec.seq_length,
            blend=blend,
            blend_per_split=spec.per_split,
            split=None if spec.per_split else spec.split,
            path_to_cache=spec.cache,
            tokenizer=Tokenizer(spec.eod),
            **fields | spec.config,
        )
        return Builder(dataset_class(spec.dataset), sizes, _builds(spec, vp_stage), config).build()

    call = guarded(host, provider) if spec.guard else provider
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        built = [call(list(spec.sizes), vp_stage=chunk) for chunk in range(spec.chunks)]
    from megaresume.hosts.megatron.guard.order import shared

    if spec.guard:
        shared(host)
    order = host.order
    return {
        "train": identities(built[0][0]),
        "valid": identities(built[0][1]),
        "test": identities(built[0][2]),
        "chunks": [identities(b[0]) for b in built],
        "payload": None if order is None else order.snapshot(spec.samples).to_dict(),
        "output": output.getvalue(),
    }


def _builds(spec: Spec, chunk: int | None) -> Any:
    import torch.distributed as dist

    return lambda: spec.builds_on is None or dist.get_rank() in spec.builds_on[chunk or 0]


def identities(dataset: Any) -> Any:
    """What the samples are, in order: a hash of the tokens of each."""
    if dataset is None:
        return None
    if isinstance(dataset, list):
        return [identities(d) for d in dataset]
    if type(dataset).__name__.startswith("BERT"):
        return [str(row) for row in dataset.sample_index]  # its items want a real tokenizer
    if hasattr(dataset, "datasets") and type(dataset.datasets[0]).__name__.startswith("BERT"):
        turns = zip(dataset.dataset_index, dataset.dataset_sample_index, strict=True)
        return [f"{d} {dataset.datasets[d].sample_index[i]}" for d, i in turns]
    return [hashlib.md5(np.asarray(dataset[i]["tokens"]).tobytes()).hexdigest()[:12] for i in range(len(dataset))]


def init_process_group() -> None:
    """One process is a group of one: the blend of older versions asks for its rank."""
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if "STORE" in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=size)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def main() -> None:
    """``orders.py SPEC.json RESULT.json``: a list of specs, run one after the other; each may resume the one before."""
    specs, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    results: list[dict[str, Any]] = []
    rank = os.environ.get("RANK", "0")
    if "HOST" in os.environ:
        socket.gethostname = lambda: f"host{rank}"
    for raw in specs:
        if raw.pop("resume", False):
            raw["loaded"] = results[-1]["payload"]
        if raw.pop("cache_per_rank", False):
            raw["cache"] += rank
        try:
            results.append(run(Spec(**raw)))
        except Exception as error:  # noqa: BLE001  it is the result
            results.append({"error": str(error), "type": type(error).__name__, "payload": raw.get("loaded")})
    result.with_name(result.name + rank).write_text(json.dumps(results))
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def as_dict(spec: Spec, **more: Any) -> dict[str, Any]:
    """A spec for the program."""
    return asdict(spec) | more


if __name__ == "__main__":
    main()
