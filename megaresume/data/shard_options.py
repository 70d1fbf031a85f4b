"""``kind: webdataset``, ``image_folder`` and ``energon`` in a data.yaml: turns their options into a `ShardSource`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from megaresume.data.energon import OUR_PARTS, read_energon
from megaresume.data.inputs import expand_shards, expanded, join
from megaresume.data.record_index import SUFFIX, ShardIndex, index_path
from megaresume.data.shard_source import ShardSource, TooLong
from megaresume.stream.data_yaml import SOURCE_KEYS
from megaresume.stream.errors import ConfigError, CorpusError
from megaresume.stream.schema import Before, Options, Within, read, refused
from megaresume.stream.yaml_text import read_encoder


def _is_text(value: object) -> bool:
    return isinstance(value, str | os.PathLike) and bool(os.fspath(value))


def _directory(value: Any) -> Any:
    if value is not None and not _is_text(value):
        raise refused(expected="a directory or URL")
    return value


def _files(value: Any) -> Any:
    if value is not None and not (all(map(_is_text, value)) if isinstance(value, list | tuple) else _is_text(value)):
        raise refused(expected="a path, pattern or URL, or a list of them")
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardOptions(Options):
    """The options of ``kind: webdataset``; `ShardSource` explains the policies."""

    ALSO: ClassVar[tuple[str, ...]] = ("kind", "split", *SOURCE_KEYS)
    #: tar shards, if they are not where the index says.
    path: Annotated[Any, Before(_files)] = None
    index: Any = None
    on_fault: Literal["error", "mask", "truncate"] = "error"
    too_long: TooLong = "error"
    max_tokens: Annotated[int, Within(1, 1 << 40)] | None = None
    augment: Any = None
    #: options of the encoder that the index was made with, or the file that has them.
    encoder: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFolderOptions(ShardOptions):
    """The options of ``kind: image_folder``, whose ``path`` is JSON lines."""

    #: directory or URL of the images, if it is not where the index says.
    image_folder: Annotated[Any, Before(_directory)] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EnergonOptions(ShardOptions):
    """The options of ``kind: energon``, whose ``path`` is a directory with .nv-meta."""

    split_part: str | None = None
    split_config: str = "split.yaml"
    dataset_config: str = "dataset.yaml"


def open_webdataset(options: Mapping[str, Any], name: str, base_dir: Path) -> ShardSource:
    """The source of ``{kind: webdataset, path: ..., index: ...}``.

    Raises:
        ConfigError: an unknown option, or one that does not fit the index.
        CorpusError: index or shards are missing, damaged or different.
    """
    said: ShardOptions = read(ShardOptions, options, f"source '{name}'", inside=f"sources.{name}")
    index = _index(said, name, base_dir)
    _check_kind(index, name, "webdataset")
    return _source(index, said, name, base_dir, shards=_moved(said.path, index, name, base_dir))


def open_image_folder(options: Mapping[str, Any], name: str, base_dir: Path) -> ShardSource:
    """The source of ``{kind: image_folder, index: ..., path: ..., image_folder: ...}``.

    Raises:
        ConfigError: an unknown option, or one that does not fit the index.
        CorpusError: index, JSON lines or folder are missing, damaged or different.
    """
    said: ImageFolderOptions = read(ImageFolderOptions, options, f"source '{name}'", inside=f"sources.{name}")
    index = _index(said, name, base_dir)
    _check_kind(index, name, "image_folder")
    folder = said.image_folder
    if folder is not None:
        folder = join(base_dir, expanded(folder))
    return _source(index, said, name, base_dir, shards=_moved(said.path, index, name, base_dir), folder=folder)


def open_energon(options: Mapping[str, Any], name: str, base_dir: Path) -> ShardSource:
    """The source of ``{kind: energon, path: DIR, index: ...}``, with its own split.

    Raises:
        ConfigError: an unknown option or part, or one that does not fit the index.
        CorpusError: index, data set or shards are missing, damaged or different.
    """
    said: EnergonOptions = read(EnergonOptions, options, f"source '{name}'", inside=f"sources.{name}")
    path = said.path
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise ConfigError(
            f"source '{name}' has no path",
            found=repr(path),
            expected="path: the directory with .nv-meta, or a metadataset.yaml",
            action=f"add path to source '{name}'",
        )
    directory = join(base_dir, expanded(path))
    index = _index(said, name, base_dir)
    if "folder" in index.header:
        _check_kind(index, name, "energon")
    found = index.header.get("energon")
    configs = {"split_config": said.split_config, "dataset_config": said.dataset_config}
    if found is None or found["hash"] != read_energon(directory, **configs).hash:
        raise CorpusError(
            f"source '{name}': {index.path} is not the index of {directory} as it is now",
            found="an index of shards without .nv-meta" if found is None else "another split or field map than now",
            expected="an index that was made of the data set as it is",
            cause="energon prepare ran again, or split.yaml or dataset.yaml was edited",
            action=f"make it again: megaresume prepare {directory} --overwrite --output {_stem(index.path)} ...",
        )
    ranges = {str(part): (int(first), int(stop)) for part, (first, stop) in found["parts"].items()}
    if said.split_part in ranges:
        parts = dict.fromkeys(OUR_PARTS, ranges[said.split_part])
    elif said.split_part is not None:
        raise ConfigError.unknown(
            f"split_part in source '{name}'", said.split_part, ranges, action="correct split_part"
        )
    else:
        parts = {ours: ranges[theirs] for ours, theirs in OUR_PARTS.items() if theirs in ranges}
    shards = [join(directory, shard["name"]) for shard in index.header["files"]]
    return _source(index, said, name, base_dir, shards=shards, parts=parts)


def default_index(path: str | os.PathLike[str]) -> str:
    """The default index of an Energon directory: beside it, ``DIR.shards.idx``."""
    return os.fspath(path).rstrip("/") + SUFFIX


def _source(index: ShardIndex, said: ShardOptions, name: str, base_dir: Path, **given: Any) -> ShardSource:
    if said.too_long != "error" and said.max_tokens is None:
        raise ConfigError(
            f"source '{name}' does not say what is too long",
            found=f"too_long: {said.too_long} without max_tokens",
            expected="max_tokens: the length that documents are held to",
            cause="it is part of what the source is: it must stay when a stage changes seq_length",
            action=f"add max_tokens to source '{name}', for example the seq_length",
        )
    _check_encoder(said.encoder, index, name, base_dir)
    return ShardSource(
        index,
        name=name,
        policy=said.on_fault,
        too_long=said.too_long,
        max_tokens=said.max_tokens,
        augment=said.augment,
        **given,
    )


def _check_encoder(options: Any, index: ShardIndex, name: str, base_dir: Path) -> None:
    """An encoder that is written down in the data.yaml must be the one that the index was made with."""
    if options is None:
        return
    from megaresume.encoding.images.encoder import ImageTextEncoder

    if isinstance(options, str | os.PathLike):
        path = base_dir / options
        options, base_dir = read_encoder(path), path.parent
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
        action="restore the encoder, or make the index again: megaresume prepare --overwrite; or leave encoder out "
        f"of source '{name}': the index holds its own",
    )


def _differences(made: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    from megaresume.stream.source import differences

    shown = []
    for field, was, is_ in differences(made, now):
        shown.append("another tokenizer" if field == "tokenizer.content" else f"{field} was {was!r}, is {is_!r}")
    return "; ".join(shown[:4])


def _index(said: ShardOptions, name: str, base_dir: Path) -> ShardIndex:
    given, path = said.index, said.path
    if given is None and isinstance(path, str) and not path.endswith(".tar"):
        given = default_index(path)
    if not isinstance(given, str | os.PathLike) or not str(given):
        raise ConfigError(
            f"source '{name}' has no index",
            found=repr(given),
            expected="index: the .shards.idx that megaresume prepare wrote",
            cause="the lengths of image-text documents are only known after they were measured",
            action=f"run megaresume prepare SHARDS --output NAME ..., then add index: NAME{SUFFIX} to source '{name}'",
        )
    return ShardIndex(base_dir / index_path(expanded(given)))


def _check_kind(index: ShardIndex, name: str, kind: str) -> None:
    made = {"energon": "energon", "folder": "image_folder"}
    right = next((right for key, right in made.items() if key in index.header), "webdataset")
    if right != kind:
        of = {"energon": "a directory with .nv-meta", "image_folder": "JSON lines and a folder of images"}
        raise ConfigError(
            f"source '{name}' is of another kind",
            found=f"kind: {kind} with {index.path}, which was made from {of.get(right, 'tar shards')}",
            expected=f"kind: {right}",
            action=f"write kind: {right} in source '{name}'",
        )


def _moved(path: Any, index: ShardIndex, name: str, base_dir: Path) -> Sequence[str] | None:
    """The files of an index at another path, if one is given."""
    if path is None:
        return None
    patterns = [path] if isinstance(path, str | os.PathLike) else list(path)
    return _same_shards(expand_shards(patterns, base_dir), index, name)


def _same_shards(shards: Sequence[str], index: ShardIndex, name: str) -> Sequence[str]:
    """The shards at another path, if they are those of the index."""
    wanted = [shard.path.rpartition("/")[2] for shard in index.files]
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
        "best a separate source",
    )


def _stem(path: Path) -> str:
    return str(path).removesuffix(SUFFIX)
