"""``megaresume prepare`` for tar shards and Energon datasets: turns flags into an encoder, and prints a summary."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaresume.command_line import given_of, names_of
from megaresume.stream.errors import UsageError

if TYPE_CHECKING:
    from megaresume.data.prepare.shards import ShardSummary
    from megaresume.encoding.images.encoder import ImageTextEncoder

#: The suffixes of JSON lines files, beside a folder of images.
_LINES = (".jsonl", ".ndjson", ".json")


def add_shard_arguments(parser: argparse.ArgumentParser) -> list[str]:
    """Add the flags that only apply to shards; returns their names in the namespace."""
    group = parser.add_argument_group(
        "image-text records in tar shards (.tar, or a directory that Energon prepared), or JSON lines and images"
    )
    group.add_argument(
        "--image-folder",
        metavar="DIR",
        help="the inputs are JSON lines whose rows name images below this directory or URL: they stay as they are",
    )
    group.add_argument(
        "--encoder", metavar="FILE", help="YAML file with tokenizer, processor, template, image_token, images"
    )
    group.add_argument(
        "--processor",
        metavar="KIND",
        help="images to tokens: patches, tiles, native or python; options as YAML: '{kind: patches, size: 336}', or "
        "the values of a model: '{preset: qwen3-vl}', '{model: DIRECTORY}'",
    )
    group.add_argument(
        "--template", metavar="KIND", help="record to document: caption (default), chat, ...; options as YAML"
    )
    group.add_argument("--images", metavar="YAML", help="formats, max_pixels, orientation, background, animated")
    group.add_argument("--image-token", metavar="TEXT", help="token of the tokenizer that marks an image")
    group.add_argument(
        "--invalid",
        choices=("error", "mask", "drop"),
        help="for a record that cannot be measured: stop (default); one token that nothing is learned from; leave it "
        "out. Counted and listed either way",
    )
    group.add_argument(
        "--decode", action="store_true", help="decode every image: finds truncated ones, which a header does not show"
    )
    group.add_argument("--split-config", metavar="NAME", help="Energon's split file in .nv-meta (default: split.yaml)")
    group.add_argument(
        "--dataset-config", metavar="NAME", help="Energon's dataset file in .nv-meta (default: dataset.yaml)"
    )
    return names_of(group)


def wants_shards(args: argparse.Namespace) -> bool:
    """Whether the inputs are shards; refuses flags for the other kind of input.

    Raises:
        UsageError: both shards and text, or a flag that does not apply to the inputs.
    """
    from megaresume.data.inputs import is_index, is_shards, is_text
    from megaresume.data.metadatasets import is_metadataset
    from megaresume.data.remote import is_url

    kinds = [
        args.image_folder is not None
        or is_shards(path)
        or is_index(path)
        or is_metadataset(path)
        or (is_url(path) and not is_text(path))
        for path in args.inputs
    ]
    if any(kinds) and not all(kinds):
        raise UsageError(
            "shards and text in one prepare",
            found=f"{args.inputs[kinds.index(True)]} and {args.inputs[kinds.index(False)]}",
            expected="tar shards, or text",
            action="prepare them by themselves: they are two sources of a blend",
        )
    shards = any(kinds)
    if wrong := given_of(args, (*args.text_only, *args.chat_only, "bad_lines") if shards else args.shards_only):
        flag = wrong[0]
        what = "text" if not shards else "tar shards" if args.image_folder is None else "JSON lines with --image-folder"
        raise UsageError(
            f"{flag} does not hold for {what}",
            found=f"{flag} {getattr(args, flag[2:].replace('-', '_'))}, with {args.inputs[0]}",
            expected="flags of "
            + (what if shards else "text: inputs that end in .tar are shards, and JSON lines with --image-folder"),
            action="--invalid drop leaves bad records out" if flag == "--bad-lines" else f"remove {flag}",
        )
    return shards


def run_shards(args: argparse.Namespace) -> int:
    """Exit status 0 when the index is complete.

    Raises:
        MegaresumeError: see `megaresume.data.prepare.shards.prepare_shards`.
    """
    from megaresume.data.inputs import is_index
    from megaresume.data.metadatasets import index_files, is_metadataset
    from megaresume.data.prepare.shards import prepare_shards

    if any(is_index(path) for path in args.inputs):
        return _run_join(args)
    encoder = _encoder(args)
    if args.image_folder is not None:
        _check_lines(args, encoder)
    jobs: list[tuple[list[str], str | Path]] = [(args.inputs, args.output)]
    if is_metadataset(args.inputs[0]):
        if len(args.inputs) > 1:
            raise UsageError(
                "one metadataset at a time",
                found=", ".join(args.inputs),
                expected="one metadataset.yaml",
                action="one command for each",
            )
        jobs = [([path], index) for path, index in index_files(args.inputs[0], Path(args.output)).items()]
    summaries = [
        prepare_shards(
            inputs,
            output,
            encoder,
            folder=args.image_folder,
            invalid=args.invalid or "error",
            decode=args.decode,
            workers=args.workers,
            overwrite=args.overwrite,
            restart=args.restart,
            split_config=args.split_config or "split.yaml",
            dataset_config=args.dataset_config or "dataset.yaml",
        )
        for inputs, output in jobs
    ]
    _print(args, summaries)
    return 0


def _check_lines(args: argparse.Namespace, encoder: ImageTextEncoder) -> None:
    from megaresume.data.inputs import COMPRESSIONS

    endings = tuple(line + end for line in _LINES for end in ("", *COMPRESSIONS))
    if other := [path for path in args.inputs if not path.endswith(endings)]:
        raise UsageError(
            "--image-folder is for JSON lines",
            found=other[0],
            expected=f"files that end in {', '.join(_LINES)}, alone or with {', '.join(COMPRESSIONS)}",
            action="remove --image-folder (tar shards hold their images), or rename the file",
        )
    template = encoder.to_spec()["template"]
    if template["kind"] == "caption" and template["json_key"] is None:
        raise UsageError(
            "no key of the caption",
            found="--template caption, of rows of JSON",
            expected="the key under which a row has its text",
            action="for example --template '{kind: caption, json_key: text}'",
        )


def _run_join(args: argparse.Namespace) -> int:
    from megaresume.data.inputs import is_index
    from megaresume.data.prepare.shards import join_indexes

    given = given_of(args, (*args.shards_only, "tokenizer", "eod_token"))
    given += ["--no-append-eod"] if args.append_eod is False else []
    if given or args.restart or not all(is_index(path) for path in args.inputs):
        raise UsageError(
            "indexes are joined as they are",
            found=", ".join(given) or "other inputs, or --restart",
            expected="indexes (NAME.shards.idx) alone, with --output, --overwrite and --json",
            action="make an index of the shards first; indexes hold their encoder",
        )
    _print(args, [join_indexes(args.inputs, args.output, overwrite=args.overwrite)])
    return 0


def _print(args: argparse.Namespace, summaries: Sequence[ShardSummary]) -> None:
    if args.json:
        found = [asdict(summary) for summary in summaries]
        json.dump(found[0] if len(found) == 1 else found, sys.stdout, indent=1)
        print()
    else:
        print("\n".join(_text(summary) for summary in summaries))


def _encoder(args: argparse.Namespace) -> ImageTextEncoder:
    from megaresume.encoding.images.encoder import ImageTextEncoder
    from megaresume.stream.yaml_text import read_encoder

    flags = {
        "tokenizer": args.tokenizer,
        "eod_token": args.eod_token,
        "processor": _yaml(args.processor, "--processor"),
        "template": _yaml(args.template, "--template"),
        "images": _yaml(args.images, "--images"),
        "image_token": args.image_token,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    if args.append_eod is False:
        given["eod"] = False
    if args.encoder is None:
        if "processor" not in given:
            raise UsageError(
                "no image processor",
                found="neither --encoder nor --processor",
                expected="how many tokens an image takes",
                action="for example --processor patches (LLaVA, CLIP), tiles (InternVL) or native (Qwen2-VL)",
            )
        return ImageTextEncoder.from_options(given)
    if given:
        raise UsageError(
            "an encoder in a file and by flags",
            found=f"--encoder {args.encoder}, and {', '.join(sorted(given))}",
            expected="one of the two",
            action="write it all into the file, or all into flags",
        )
    path = Path(args.encoder)
    return ImageTextEncoder.from_options(read_encoder(path), path.parent)


def _yaml(text: str | None, flag: str) -> Any:
    if text is None:
        return None
    import yaml

    from megaresume.stream.yaml_text import parse_yaml

    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise UsageError(
            f"{flag} is not YAML",
            found=text,
            expected="a word, or options in braces",
            action=f"for example {flag} '{{kind: patches, size: 336}}'",
        ) from error


def _text(summary: ShardSummary) -> str:
    s = summary
    rate = s.bytes / max(s.seconds, 1e-9) / 1e6
    share = 100 * s.image_tokens / max(s.tokens, 1)
    what = "shards" if s.folder is None else "files"
    of_all = f"{s.resumed_shards} of {s.shards} shards" if s.folder is None else f"{s.resumed_shards} pieces of files"
    resumed = f", {of_all} from an earlier run" if s.resumed_shards else ""
    lines = [
        f"{s.index}: {s.records:,} records in {s.shards:,} {what}, {s.tokens:,} tokens",
        f"  {s.images:,} images with {s.image_tokens:,} tokens ({share:.1f} %); the longest document has {s.longest:,}",
        f"  encoder {s.encoder}",
    ]
    if s.documents > s.records:
        lines.append(f"  {s.documents:,} documents: pages longer than template.split became several")
    if s.missing_images:
        lines.append(
            f"  {s.missing_images:,} images that pages name are missing or damaged: the model is not shown them"
        )
    if s.parts:
        lines.append("  parts: " + ", ".join(f"{part} {count:,}" for part, count in s.parts.items()))
    if s.excluded:
        lines.append(f"  {s.excluded:,} records left out, as split.yaml says")
    if s.ignored_files:
        lines.append(f"  {s.ignored_files:,} files of the shards belong to no record (no extension, or __meta__)")
    if s.invalid:
        done = "masked: one token each" if s.invalid_policy == "mask" else "left out"
        lines.append(f"  {s.invalid:,} records could not be measured ({done}):")
        lines += [
            f"    document {e['document']}, {e['shard']} '{e['key']}': {e['reason']}" for e in s.first_invalid[:8]
        ]
        if s.invalid > 8:
            lines.append(f"    ... and {s.invalid - 8:,} more")
    lines.append(f"  {s.seconds:.1f} s, {rate:.1f} MB/s, {s.records / max(s.seconds, 1e-9):,.0f} records/s{resumed}")
    return "\n".join(lines)
