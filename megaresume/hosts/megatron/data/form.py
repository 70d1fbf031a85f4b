"""`SampleForm`: what an item holds, from Megatron's flags; and the flags under which it would be trained wrongly.

    Megatron-LM           tokens, labels, loss_mask, position_ids
      + attention_mask           unless --no-create-attention-mask-in-dataloader
      + cu_seqlens, max_seqlen   with --dataloader-inter-document-masking (from 0.19) or --sft (from 0.16)
    Megatron-DeepSpeed    text: the tokens of the sample and the one after them
    a blend with images   a whole `megaresume.batches.batch.Batch`, with --dataloader-type external: no two have the
                          same number of images, and get_batch of a multimodal script is its own

Two kinds of samples:

    split              as GPTDataset's: a token's label is the token after it, also where that begins another document;
                       --reset-position-ids, --reset-attention-mask and --eod-mask-loss mean what they mean there
    every other        documents are kept apart: the last token of a document has no label, position ids begin again
                       in every document, and if there is an attention mask it is the document's own
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megaresume.stream.data_yaml import PackingConfig
from megaresume.stream.errors import UsageError

#: Environment variable: 1 adds the next two keys to every item, for the audit of a training loop.
IDENTITY_VARIABLE = "MEGARESUME_SAMPLE_IDS"


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleForm:
    """What an item holds."""

    #: whole micro-batches with images instead of items (Megatron-LM with --dataloader-type external).
    images: bool = False
    #: one ``text`` of S + 1 tokens instead of everything else.
    text: bool = False
    #: labels continue into the next document, as GPTDataset's do; documents are ended by the token ``eod`` alone.
    across: bool = True
    #: begin position ids again after every ``eod`` (``across``).
    reset_position_ids: bool = False
    #: attention does not look back over an ``eod`` (``across``).
    reset_attention_mask: bool = False
    #: no loss at ``eod``.
    eod_mask_loss: bool = False
    #: add bool[1, S, S].
    attention_mask: bool = False
    #: int32[S + 1], filled up with S (``padded``); as long as it is (``exact``: micro-batches of one sample).
    cu_seqlens: Literal["padded", "exact"] | None = None
    #: segments start and end at multiples of this, in ``cu_seqlens``.
    align: int = 1
    #: the end-of-document token; None if nothing asks for it.
    eod: int | None = None
    #: add `SAMPLE_KEY` and `HASH_KEY`. Small tensors too are costly to hand over from worker processes.
    identity: bool = False
    #: add them in any case: they are taken out again before ``get_batch``.
    logged: bool = False

    @property
    def masks_of_the_plan(self) -> bool:
        """Whether loss masks are those that the documents alone say, which `megaresume verify` makes again."""
        return not (self.text or self.across or self.eod_mask_loss)


def form_of(
    args: Any,
    packing: PackingConfig,
    *,
    text: bool,
    eod: Callable[[], int],
    spans: Sequence[str] = (),
    fillers: Sequence[str] = (),
    images: bool = False,
    logged: bool = False,
) -> SampleForm:
    """What this Megatron's ``get_batch`` takes, from its arguments.

    Args:
        args: Megatron's arguments.
        packing: of the stream.
        text: Megatron-DeepSpeed.
        eod: gives the end-of-document token; called only where something depends on it.
        spans: names of the sources that say which of their tokens are trained.
        fillers: names of those that are cut, to fill what whole documents leave free.
        images: the blend has sources with images.
        logged: somebody above the loader takes what identifies the samples out of every batch again.

    Raises:
        UsageError: flags under which these samples would be trained wrongly, with those that make it right.
    """
    apart = not packing.traits.cuts or packing.align > 1
    flags = {name: bool(getattr(args, name, False)) for name in _RESETS}
    identity = os.environ.get(IDENTITY_VARIABLE, "0") not in ("", "0")
    if images:
        _check_images(args, text=text)
        return SampleForm(images=True, across=False, identity=identity, logged=logged)
    if text:
        _check_sources_of_text(spans, fillers)
        if apart:
            _check_text(flags, packing)
        return SampleForm(
            text=True, across=not apart, identity=identity, logged=logged, eod=eod()
        )  # padding is written as ends of documents
    cu_seqlens = _cu_seqlens(args, packing)
    content = flags if not apart and cu_seqlens is None else {"eod_mask_loss": flags["eod_mask_loss"]}
    return SampleForm(
        across=not apart,
        attention_mask=cu_seqlens is None and bool(getattr(args, "create_attention_mask_in_dataloader", True)),
        cu_seqlens=cu_seqlens,
        align=packing.align,
        eod=eod() if any(content.values()) else None,
        # From 0.18 on, context parallelism cuts every tensor of the batch along the sequence, also those it knows not.
        identity=identity and getattr(args, "context_parallel_size", 1) == 1,
        logged=logged,
        **content,
    )


_RESETS = {
    "reset_position_ids": "--reset-position-ids",
    "reset_attention_mask": "--reset-attention-mask",
    "eod_mask_loss": "--eod-mask-loss",
}


def _check_images(args: Any, *, text: bool) -> None:
    if text:
        raise UsageError(
            "Megatron-DeepSpeed's scripts take no images",
            found="a data config with images",
            expected="sources of text",
            action="train with megaresume.attach in your own DeepSpeed loop, or with Megatron-LM",
        )
    if args.dataloader_type != "external":
        raise UsageError(
            "batches with images have different sizes: Megatron's loader cannot stack them",
            found=f"--dataloader-type {args.dataloader_type} and a data config with images",
            expected="--dataloader-type external, and a get_batch that takes whole batches",
            action="pass --dataloader-type external; in get_batch, megaresume.batches.models.for_mcore_llava(batch) "
            "makes the arguments of the model",
        )


def _check_sources_of_text(spans: Sequence[str], fillers: Sequence[str]) -> None:
    way = "train with megaresume.attach in your own DeepSpeed loop, or with Megatron-LM"
    if spans:
        raise UsageError(
            "Megatron-DeepSpeed trains every token, and there are sources that say which are trained",
            found=f"spans of trained tokens: {', '.join(spans)}",
            expected="corpora without spans",
            cause="its get_batch takes tokens alone and makes the loss mask of them",
            action=f"{way}; or leave these sources out",
        )
    if fillers:
        raise UsageError(
            "with Megatron-DeepSpeed, documents of one sample would see each other",
            found=f"packing: split of {', '.join(fillers)}, beside documents that stay whole",
            expected="one packing for all sources",
            cause="it finds documents by their end-of-document tokens, and what is cut in two does not end with one",
            action=f"remove packing: split from {', '.join(fillers)}; or {way}",
        )


def _check_text(flags: dict[str, bool], packing: PackingConfig) -> None:
    missing = [flag for name, flag in _RESETS.items() if not flags[name]]
    if missing:
        raise UsageError(
            f"with packing {packing.mode}, documents of one sample would see each other",
            found=f"packing {packing.mode} (align {packing.align}) without {' '.join(missing)}",
            expected=" ".join(_RESETS.values()),
            cause="Megatron-DeepSpeed finds documents by their end-of-document tokens, and only if told to",
            action=f"add {' '.join(missing)}, or use packing split without align",
        )


def _cu_seqlens(args: Any, packing: PackingConfig) -> Literal["padded", "exact"] | None:
    """How this version takes the bounds of documents, if it does."""
    if getattr(args, "dataloader_inter_document_masking", False):
        flag, form = "--dataloader-inter-document-masking", "padded"
    # --sft packs since the version that brought --hybrid-context-parallel (0.16), with bounds padded since 0.19.
    elif getattr(args, "sft", False) and hasattr(args, "hybrid_context_parallel"):
        flag, form = "--sft", "padded" if hasattr(args, "dataloader_inter_document_masking") else "exact"
    else:
        return None
    if form == "exact" and args.micro_batch_size != 1:
        raise UsageError(
            "packed samples need micro-batches of one sample in this version of Megatron",
            found=f"{flag} with --micro-batch-size {args.micro_batch_size}",
            expected="--micro-batch-size 1",
            action="pass --micro-batch-size 1 and a longer --seq-length",
        )
    if flag == "--sft" and getattr(args, "create_attention_mask_in_dataloader", False):
        raise UsageError(
            "packed samples have no attention mask",
            found=f"{flag}, and masks are made in the data loader",
            expected="no mask: the bounds of the documents say it all",
            action="pass --no-create-attention-mask-in-dataloader",
        )
    _check_align(args, packing, flag)
    return "padded" if form == "padded" else "exact"


def _check_align(args: Any, packing: PackingConfig, flag: str) -> None:
    cp = int(getattr(args, "context_parallel_size", 1) or 1)
    if cp == 1:
        return
    tp = int(args.tensor_model_parallel_size) if getattr(args, "sequence_parallel", False) else 1
    need = 2 * cp * tp
    if packing.align % need:
        raise UsageError(
            "context parallelism cuts every document into equal parts, and these do not divide",
            found=f"packing.align {packing.align} with --context-parallel-size {cp}"
            + (f", --sequence-parallel and --tensor-model-parallel-size {tp}" if tp > 1 else "")
            + f" and {flag}",
            expected=f"a multiple of {need}",
            action=f"set packing: {{mode: {packing.mode}, align: {need}}} in data.yaml",
        )


def warnings_of(args: Any, form: SampleForm, packing: PackingConfig) -> list[str]:
    """What is not wrong by the flags, but hardly meant: documents of one sample that see each other."""
    if packing.traits.bins is None or form.cu_seqlens is not None:
        return []
    if not form.text and not form.attention_mask:
        why = "no attention mask is made in the data loader"
    elif getattr(args, "use_flash_attn", False) or getattr(args, "use_flash_attn_v2", False):
        why = "flash attention ignores the attention mask"
    elif not form.text and getattr(args, "transformer_impl", "local") != "local":
        why = f"--transformer-impl {args.transformer_impl} ignores the attention mask"
    elif getattr(args, "masked_softmax_fusion", False):
        why = "the fused softmax ignores the attention mask (--no-masked-softmax-fusion)"
    else:
        return []
    way = "--dataloader-inter-document-masking"
    if not hasattr(args, "dataloader_inter_document_masking"):
        way = "--transformer-impl local --no-masked-softmax-fusion" if not form.text else "--no-masked-softmax-fusion"
        way += ", without flash attention,"
    return [f"packing {packing.mode}, but documents of one sample see each other: {why}. {way} keeps them apart."]
