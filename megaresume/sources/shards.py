"""``kind: webdataset`` and ``kind: energon`` in a data.yaml: options to `ShardSource`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from megaresume.shards.energon import OUR_PARTS, read_energon
from megaresume.shards.index import ShardIndex
from megaresume.shards.layout import SUFFIX, index_path
from megaresume.shards.paths import expand_shards, join
from megaresume.shards.source import ShardSource, TooLong, check_choice
from megaresume.stream.errors import ConfigError, CorpusError

__all__ = ["default_index", "open_energon", "open_webdataset"]

COMMON = ("path", "index", "on_fault", "too_long", "max_tokens", "augment", "encoder")
ENERGON = (*COMMON, "split_part", "split_config", "dataset_config")
OF_EVERY_KIND = ("kind", "split", "weight", "max_epochs", "on_exhausted", "shuffle")
POLICIES = ("error", "mask", "truncate")


def open_webdataset(options: Mapping[str, Any], name: str, base_dir: Path) -> ShardSource:
    """The source of ``{kind: webdataset, path: ..., index: ...}``.

    Raises:
        ConfigError: an unknown option, or one that does not fit the index.
        CorpusError: index or shards are missing, damaged or others.
    """
    _known(options, COMMON, name)
    path = options.get("path")
    index = _index(options, name, base_dir)
    if "energon" in index.header:
        raise ConfigError(
            f"source '{name}' is an Energon data set",
            found=f"kind: webdataset with {index.path}, which was made of a directory with .nv-meta",
            expected="kind: energon, which knows its train, val and test part",
            action=f"write kind: energon in source '{name}'",
        )
    shards = None
    if path is not None:
        patterns = [path] if isinstance(path, str | os.PathLike) else list(path)
        shards = _same_shards(expand_shards(patterns, base_dir), index, name)
    return _source(index, options, name, base_dir, shards=shards)


def open_energon(options: Mapping[str, Any], name: str, base_dir: Path) -> ShardSource:
    """The source of ``{kind: energon, path: DIR, index: ...}``, with the parts of its own split.

    Raises:
        ConfigError: an unknown option or part, or one that does not fit the index.
        CorpusError: index, data set or shards are missing, damaged or others.
    """
    _known(options, ENERGON, name)
    path = options.get("path")
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise ConfigError(
            f"source '{name}' has no path",
            found=repr(path),
            expected="path: the directory with .nv-meta, or a metadataset.yaml",
            action=f"add path to source '{name}'",
        )
    directory = join(base_dir, os.path.expanduser(os.path.expandvars(os.fspath(path))))
    index = _index(options, name, base_dir)
    found = index.header.get("energon")
    configs = {key: str(options[key]) for key in ("split_config", "dataset_config") if key in options}
    if found is None or found["hash"] != read_energon(directory, **configs).hash:
        raise CorpusError(
            f"source '{name}': {index.path} is not the index of {directory} as it is now",
            found="an index of shards without .nv-meta" if found is None else "another split or field map than now",
            expected="an index that was made of the data set as it is",
            cause="energon prepare ran again, or split.yaml or dataset.yaml was edited",
            action=f"make it again: megaresume prepare {directory} --overwrite --output {_stem(index.path)} ...",
        )
    ranges = {str(part): (int(first), int(stop)) for part, (first, stop) in found["parts"].items()}
    part = options.get("split_part")
    if part is not None:
        check_choice(part, tuple(ranges), "split_part", name)
        parts = dict.fromkeys(OUR_PARTS, ranges[part])
    else:
        parts = {ours: ranges[theirs] for ours, theirs in OUR_PARTS.items() if theirs in ranges}
    shards = [join(directory, shard["name"]) for shard in index.header["shards"]]
    return _source(index, options, name, base_dir, shards=shards, parts=parts)


def default_index(path: str | os.PathLike[str]) -> str:
    """Where the index of an Energon directory is when nobody says: beside it, ``DIR.shards.idx``."""
    return os.fspath(path).rstrip("/") + SUFFIX


def _source(index: ShardIndex, options: Mapping[str, Any], name: str, base_dir: Path, **given: Any) -> ShardSource:
    policy, too_long = options.get("on_fault", "error"), options.get("too_long", "error")
    max_tokens = options.get("max_tokens")
    check_choice(policy, POLICIES, "on_fault", name)
    check_choice(too_long, get_args(TooLong), "too_long", name)
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1):
        raise ConfigError(
            f"bad value of max_tokens in source '{name}'",
            found=repr(max_tokens),
            expected="a number of tokens, 1 or more",
            action="correct max_tokens",
        )
    if too_long != "error" and max_tokens is None:
        raise ConfigError(
            f"source '{name}' does not say what is too long",
            found=f"too_long: {too_long} without max_tokens",
            expected="max_tokens: the length that documents are held to",
            cause="it is part of what the source is: it must stay when a stage changes seq_length",
            action=f"add max_tokens to source '{name}', for example the seq_length",
        )
    _check_encoder(options.get("encoder"), index, name, base_dir)
    return ShardSource(
        index,
        name=name,
        policy=policy,
        too_long=too_long,
        max_tokens=max_tokens,
        augment=options.get("augment"),
        **given,
    )


def _check_encoder(options: Any, index: ShardIndex, name: str, base_dir: Path) -> None:
    """An encoder that is written down in the data.yaml must be the one that the index was made with."""
    if options is None:
        return
    from megaresume.images.encoder import ImageTextEncoder
    from megaresume.sources.catalog import read_data_config

    if isinstance(options, str | os.PathLike):
        options, base_dir = read_data_config(base_dir / options)
    encoder = ImageTextEncoder.from_options(options, base_dir)
    made = index.header["encoder"]
    if encoder.fingerprint == made["fingerprint"]:
        return
    differ = _differences(made["spec"], encoder.to_spec())
    raise ConfigError(
        f"source '{name}': its index was made with another encoder",
        found=f"fingerprint {encoder.fingerprint} of the encoder in the data config{f' ({differ})' if differ else ''}",
        expected=f"fingerprint {made['fingerprint']}, of {index.path}",
        cause="the tokenizer, the processor or the template was changed since megaresume prepare",
        action="give the encoder back, or make the index again: megaresume prepare --overwrite; or leave encoder out "
        f"of source '{name}': the index holds its own",
    )


def _differences(made: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    from megaresume.stream.fingerprints import differences

    shown = []
    for field, was, is_ in differences(made, now):
        shown.append("another tokenizer" if field == "tokenizer.content" else f"{field} was {was!r}, is {is_!r}")
    return "; ".join(shown[:4])


def _index(options: Mapping[str, Any], name: str, base_dir: Path) -> ShardIndex:
    given = options.get("index")
    path = options.get("path")
    if given is None and options.get("path") is not None and isinstance(path, str) and not path.endswith(".tar"):
        given = default_index(path)
    if not isinstance(given, str | os.PathLike) or not str(given):
        raise ConfigError(
            f"source '{name}' has no index",
            found=repr(given),
            expected="index: the .shards.idx that megaresume prepare wrote",
            cause="the lengths of image-text documents are only known after they were measured",
            action=f"run megaresume prepare SHARDS --output NAME ..., then add index: NAME{SUFFIX} to source '{name}'",
        )
    return ShardIndex(base_dir / index_path(os.path.expanduser(os.path.expandvars(given))))


def _same_shards(shards: Sequence[str], index: ShardIndex, name: str) -> Sequence[str]:
    """The shards at another place, if they are those of the index."""
    wanted = [shard.path.rpartition("/")[2] for shard in index.shards]
    found = [path.rpartition("/")[2] for path in shards]
    if found == wanted:
        return shards
    pairs = enumerate(zip(found, wanted, strict=False))
    where = next((k for k, (a, b) in pairs if a != b), min(len(found), len(wanted)))
    raise CorpusError(
        f"source '{name}' names other shards than its index",
        found=f"{len(found)} shards" + (f", number {where} is {found[where]}" if where < len(found) else ""),
        expected=f"{len(wanted)} shards" + (f", number {where} is {wanted[where]}" if where < len(wanted) else ""),
        cause="shards were added or removed after megaresume prepare",
        action="leave path out (the index knows its shards), name the same shards, or prepare again; new shards are "
        "best a source of their own",
    )


def _known(options: Mapping[str, Any], known: Sequence[str], name: str) -> None:
    for key in options:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            raise ConfigError(
                f"unknown key '{key}' in source '{name}'",
                found=repr(key),
                expected=f"one of {', '.join([*known, *OF_EVERY_KIND])}",
                cause=f"did you mean '{close[0]}'?" if close else None,
                action="correct or remove the key",
            )


def _stem(path: Path) -> str:
    return str(path).removesuffix(SUFFIX)
