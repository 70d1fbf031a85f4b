"""The images in samples as files, and a page to view them.

``megaresume trace --images DIR`` writes the pictures of every image-text segment, with a list and a page:

    DIR/images.jsonl   a line for the file's format, then a line per document: where trained, record, text, images
        index.html     the same to look at
        step_0000007/sample_00000048-segment_01-pages_17-epoch_0-place_000012.png             the member, byte for byte
        step_0000007/sample_00000048-segment_01-pages_17-epoch_0-place_000012.augmented.png   as augmentation left it

Everything is written to a directory beside DIR, which is renamed when complete. An existing directory is replaced only
if its own list names each of its files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megaresume.data.source import DocumentSource, is_document_source
from megaresume.encoding.images.document import Key
from megaresume.files import leftover_name
from megaresume.render import escape, page_head
from megaresume.runs.answer import Answer
from megaresume.runs.trace.documents import Shown, of_stage, show
from megaresume.runs.trace.trace import Trace, TracePiece
from megaresume.stream.errors import CheckpointError, UsageError, listed
from megaresume.stream.progress import Progress

FORMAT, VERSION = "megaresume.images", 1
LIST, PAGE = "images.jsonl", "index.html"

_STYLE = """
article { border-top: 1px solid #ccc; padding: .7em 0 } h2 { font-size: 15px; margin: 0 }
p.text { white-space: pre-wrap } figure { display: inline-block; margin: .3em .8em .3em 0; vertical-align: top }
img { max-width: 20em; max-height: 20em; border: 1px solid #ddd } figcaption, small { color: #555 }
.fault { color: #b00 }
"""


@dataclass(kw_only=True, slots=True)
class ImagesWritten(Answer):
    """The images that `write_images` wrote."""

    directory: Path
    #: samples.
    first: int
    stop: int
    documents: int = 0
    images: int = 0
    #: the number of images that the model does not see: in a masked document, or after its cut.
    not_shown: int = 0
    #: documents for which a fault policy was applied.
    faults: int = 0


def check_directory(directory: Path) -> None:
    """Refuse a directory with files that `write_images` did not write.

    Raises:
        UsageError: it has some, or it is not a directory.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UsageError(
            f"{directory} is not a directory",
            found="a file",
            expected="a directory, or nothing yet",
            action="name another directory",
        )
    held = {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_symlink() or not p.is_dir()}
    foreign = sorted(held - _written(directory))
    if foreign:
        raise UsageError(
            f"{directory} is not empty",
            found=f"{listed(foreign, 3)}, not written by --images",
            expected="a new or empty directory, or one that --images wrote and nobody added to",
            action="name another directory",
        )


def _written(directory: Path) -> set[str]:
    """The files in a directory's own list."""
    try:
        head, *lines = [json.loads(line) for line in (directory / LIST).read_bytes().splitlines()]
        if head["format"] != FORMAT:
            return set()
        images = [image for line in lines for image in line["images"]]
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    return {LIST, PAGE, *(i[name] for i in images for name in ("file", "augmented") if i.get(name))}


def write_images(
    directory: Path,
    trace: Trace,
    sources: Mapping[str, object],
    first: int,
    stop: int,
    *,
    augmented: bool = False,
    progress: Progress = lambda samples: None,
) -> ImagesWritten:
    """Write the pictures in samples ``first .. stop``.

    Args:
        directory: new, empty, or written by this function.
        trace: the run.
        sources: its corpora, by name.
        first, stop: samples.
        augmented: also write each image that the model sees after augmentation, as PNG.
        progress: called with the samples planned, and again with those written, since the last call.

    Raises:
        UsageError: the run has no images, or the directory has other files.
        CorpusError: a document cannot be read, and its policy is ``error``.
        CheckpointError: a file cannot be written; or see `Trace.pieces`.
    """
    with_images = {name: source for name, source in sources.items() if is_document_source(source)}
    if not any(i in trace.records for i in range(len(trace.names))):
        raise UsageError(
            "this run has no images",
            found=f"sources {', '.join(trace.names)}, none of them tar shards",
            expected="a source of kind webdataset, image_folder or energon",
            action="--text shows what they say" if not with_images else None,
        )
    done = ImagesWritten(directory=directory, first=first, stop=stop)
    directory = directory.resolve()
    check_directory(directory)
    temporary = directory.with_name(leftover_name(directory.name))
    try:
        temporary.mkdir(parents=True)
        with (
            open(temporary / LIST, "w", encoding="utf-8") as lines,
            open(temporary / PAGE, "w", encoding="utf-8") as page,
        ):
            writer = _Writer(done, temporary, trace, with_images, lines, page, augmented=augmented)
            writer.begin()
            for piece in trace.pieces(first, stop, progress=progress):
                for row in piece.rows():
                    writer.write(piece, row)
                    progress(0 if piece.left_out else 1)
            writer.end()
        _replace(temporary, directory)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {directory}",
            found=error.strerror or str(error),
            action="check the directory and its free space",
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return done


def _replace(new: Path, directory: Path) -> None:
    """Rename a complete directory into place."""
    check_directory(directory)  # it may have been filled since
    old = new.with_suffix(".old")
    if directory.exists():
        os.rename(directory, old)
    os.rename(new, directory)
    shutil.rmtree(old, ignore_errors=True)


class _Writer:
    def __init__(
        self,
        done: ImagesWritten,
        root: Path,
        trace: Trace,
        sources: Mapping[str, DocumentSource],
        lines: IO[str],
        page: IO[str],
        *,
        augmented: bool,
    ) -> None:
        self.done = done
        self._root, self._trace, self._sources, self._augmented = root, trace, sources, augmented
        self._list, self._page = lines, page
        self._words = _file_words(trace.names)

    def begin(self) -> None:
        first, stop = self.done.first, self.done.stop
        head = {"format": FORMAT, "version": VERSION, "samples": [first, stop], "augmented": self._augmented}
        self._list.write(json.dumps(head) + "\n")
        title = f"Images of samples {first} to {stop - 1}"
        self._page.write(page_head(title, _STYLE) + f"<h1>{title}</h1>\n")

    def end(self) -> None:
        done = self.done
        self._page.write(f"<p>{done.images:,} images of {done.documents:,} documents.</p></html>\n")

    def write(self, piece: TracePiece, row: Mapping[str, Any]) -> None:
        """Write the documents of a sample."""
        for number, segment in enumerate(row["segments"]):
            name = segment["source"]
            if self._trace.names.index(name) not in self._trace.records:
                continue
            key = Key(seed=piece.config.seed, source=name, document=segment["document"], epoch=segment["epoch"])
            shown = show(of_stage(self._sources[name], name, piece.config), key)
            line = {k: row[k] for k in ("step", "sample", "absolute", "rank", "micro_batch") if k in row}
            line |= {"segment": number} | {k: v for k, v in segment.items() if k != "offset"}
            line["key"] = None if shown.record is None else shown.record.key
            if shown.encoder is not None:
                line["text"] = shown.text(shown.encoder.tokenizer)
            line["fault"] = shown.fault()
            line["images"] = self._images(line, shown)
            self.done.documents += 1
            self.done.faults += line["fault"] is not None
            self._list.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._page.write(_article(line))

    def _images(self, line: Mapping[str, Any], shown: Shown) -> list[dict[str, Any]]:
        images = []
        for k, picture in enumerate(shown.pictures):
            if shown.record is None or picture.member is None:
                continue
            seen = picture.offset is not None
            place = line["place"] + picture.offset if picture.offset is not None else None
            stem = self._stem(line, k, place)
            file = f"{stem}.{_suffix(picture.member)}"
            (self._root / file).parent.mkdir(exist_ok=True)
            (self._root / file).write_bytes(shown.record.members[picture.member])
            entry: dict[str, Any] = {"member": picture.member, "file": file}
            if seen and self._augmented:
                entry["augmented"] = f"{stem}.augmented.png"
                shown.augmented(k).save(self._root / entry["augmented"], "PNG")
            width, height = picture.size or (None, None)
            entry |= {"width": width, "height": height, "tokens": picture.num_tokens, "place": place, "shown": seen}
            images.append(entry)
            self.done.images += 1
            self.done.not_shown += not seen
        return images

    def _stem(self, line: Mapping[str, Any], number: int, place: int | None) -> str:
        """A path without a suffix that contains no text from the corpus."""
        if line["sample"] is None:
            folder, sample = "left_out", f"absolute_{line['absolute']:08d}"
        else:
            step = line["step"]
            folder, sample = "step_unknown" if step is None else f"step_{step:07d}", f"sample_{line['sample']:08d}"
        words = [sample, f"segment_{line['segment']:02d}", f"{self._words[line['source']]}_{line['document']}"]
        words += [f"epoch_{line['epoch']}", f"not_shown_{number}" if place is None else f"place_{place:06d}"]
        return f"{folder}/{'-'.join(words)}"


def _suffix(member: str) -> str:
    """The suffix of an image's name in safe characters: ``jpg`` for ``cats/1.jpg``, ``1.jpg`` and ``jpg``."""
    found = re.search(r"(?:\A|[./])([0-9A-Za-z]{1,8})\Z", member)
    return "image" if found is None else found[1]


def _file_words(names: list[str]) -> dict[str, str]:
    """Names of sources made safe for file names on any system; they stay distinct."""
    words: dict[str, str] = {}
    for i, name in enumerate(names):
        word = re.sub(r"[^A-Za-z0-9_]", "_", name)[:64]
        taken = {other.lower() for other in words.values()}  # some file systems ignore case
        words[name] = word if word == name and word.lower() not in taken else f"{word}_{i}"
    return words


def _article(line: Mapping[str, Any]) -> str:
    """A document on the page; all text from the corpus is escaped."""
    where = [("step", line["step"]), ("sample", line["sample"]), ("absolute", line.get("absolute"))]
    where += [("rank", line["rank"]), ("micro-batch", line["micro_batch"]), ("place", line["place"])]
    words = [f"{name} {value}" for name, value in where if value is not None]
    title = f"{line['source']}:{line['document']} epoch {line['epoch']}, {line['length']} tokens"
    record = f"{line['shard']} #{line['record']}" + (f" '{line['key']}'" if line["key"] is not None else "")
    parts = [f"<article><h2>{escape(title)}</h2><p>{escape(', '.join(words))} <small>{escape(record)}</small></p>"]
    if line["fault"] is not None:
        parts.append(f'<p class="fault">{escape(line["fault"]["policy"])}: {escape(line["fault"]["reason"])}</p>')
    for image in line["images"]:
        size = "size unknown" if image["width"] is None else f"{image['width']}x{image['height']}"
        caption = f"{image['member']} {size}, " + (
            f"{image['tokens']} tokens at {image['place']}" if image["shown"] else "not shown to the model"
        )
        files = [file for file in (image["file"], image.get("augmented")) if file]
        tags = "".join(
            f'<a href="{escape(file)}"><img loading="lazy" src="{escape(file)}" alt=""></a>' for file in files
        )
        parts.append(f"<figure>{tags}<figcaption>{escape(caption)}</figcaption></figure>")
    parts.append(f'<p class="text">{escape(line.get("text", ""))}</p></article>\n')
    return "".join(parts)
