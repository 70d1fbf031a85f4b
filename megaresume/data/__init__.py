"""Documents and records: where they lie, how long they are, what they hold.

What a data config names, opened
catalog.py             name -> ``{path, kind, split, ...}`` to name -> `Source`, of one vocabulary
data_config.py         data.yaml, the mapping in it, or ``--data-path``: read once
data_path.py           the classic ``--data-path``: weights and paths in one list
metadataset.py         Energon's metadatasets: one source of the config becomes several
shard_options.py       ``kind: webdataset``, ``image_folder`` and ``energon``
overlap.py             whether documents that are held out are, or were, trained on
yaml_text.py           YAML that people wrote, with one kind of error for whatever is wrong with it

Sources
source.py              `Source`: what loading asks of any source
python_source.py       any object with __len__, length(i), get(i) as a source; items of a dataset by number alone
split.py               `RangeSource`: the train, valid or test part of a source, as ``--split`` cuts it
scan.py                the fingerprint of any source, and what it sees of the tokens

Documents of text: a Megatron .bin/.idx corpus, or an .idx and raw files
indexed_documents.py   `IndexedDocuments`: documents whose lengths stand in an .idx
corpus.py              `IndexedSource`: tokens in a .bin; `open_corpus`: either
row_source.py          `RowSource`: rows of raw files by their places, each compared with the index
layout.py              the bytes of .bin/.idx, for its reader and its writer; kernels.py reads its arrays
spans.py               ``<prefix>.spans``: which tokens of a corpus are trained
sidecar.py             ``<prefix>.megaresume.json`` and .pieces: what need not be computed twice
files.py               whether files are those that were opened; files mapped, and written without a half one

Raw files of text
inputs.py              which files, in which order, of which format
streams.py             a file opened and decompressed, or unpacked once on each machine; what is not text is refused
row_lines.py           rows of Parquet, Arrow, CSV and arrays of JSON as JSON lines; where lines lie
documents.py           the bytes of a file as texts, or conversations
document_encoder.py    documents to tokens

Image-text records: in tar shards, as webdataset and Energon have them, or in JSON lines and a folder of images
shard_source.py        `ShardSource`: records as documents
record_index.py        ``NAME.shards.idx``, and ``.places`` of rows: where records lie, what they are compared by
tar.py                 members to records, and the damage that archives can have
image_folder.py        rows of JSON lines, with the images that they name, to records
energon.py             ``.nv-meta`` of an Energon data set, and its field map
shard_paths.py         braces, wildcards, URLs to a list of shards

Bytes from disks and object stores
shard_files.py         range reads: local descriptors, object stores (remote.py)
ahead.py               what comes next is read before it is needed
disk_cache.py          records of object stores on a local disk, for the next epoch

prepare/               raw files and shards to corpora and indexes
"""
