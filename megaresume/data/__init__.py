"""Documents and records: where they lie, how long they are, what they hold.

What a data config names, opened
catalog.py             name -> ``{path, kind, split, ...}`` to name -> `Source`
held_out.py            do sources share documents? was what is held out trained on?
data_config.py         data.yaml, the mapping in it, or ``--data-path``: read once
data_path.py           ``--data-path``, as Megatron reads it
metadatasets.py        Energon's metadatasets as sources
shard_options.py       ``kind: webdataset``, ``image_folder`` and ``energon``

Sources
source.py              `Source`: what loading asks of any source; its fingerprint
python_source.py       any object with __len__, length(i), get(i) as a source; items of a dataset by number alone
split.py               `open_corpus`; `RangeSource`: the train, valid or test part of a source, as ``--split`` cuts it

Documents of text: a Megatron .bin/.idx corpus, or an .idx and raw files
indexed_documents.py   `IndexedDocuments`: documents whose lengths stand in an .idx
row_source.py          `RowSource`: rows of raw files by their places, each compared with the index
layout.py              the bytes of .bin/.idx, for reader and writer; kernels.py reads their arrays
spans.py               the bytes of .spans, for reader and writer: which tokens are trained
sidecar.py             ``<prefix>.megaresume.json`` and .pieces: what need not be computed twice; did files change?

Raw files of text
inputs.py              which files, in which order, of which format; braces, wildcards, URLs to a list of shards
streams.py             a file opened and decompressed, or unpacked once on each machine; what is not text is refused
row_lines.py           rows of Parquet, Arrow, CSV and arrays of JSON as JSON lines; where lines lie
documents.py           the bytes of a file as texts, or conversations; and as tokens

Image-text records: in tar shards, as webdataset and Energon have them, or in JSON lines and a folder of images
shard_source.py        `ShardSource`: records as documents
record_index.py        ``NAME.shards.idx``, and ``.places`` of rows: where records lie, what they are compared by
tar.py                 members to records, and the damage that archives can have
image_folder.py        rows of JSON lines, with the images that they name, to records
energon.py             ``.nv-meta`` of an Energon data set, and its field map

Bytes from disks and object stores
shard_files.py         range reads of local files and object stores
read_ahead.py          what comes next is read before it is needed
remote.py              requests to object stores, tried again with back-off
disk_cache.py          what they gave, on a local disk, for the next epoch
s3_ranges.py           ranges of S3 by obstore, in less processor time than s3fs takes
store_counts.py        how often a request was tried again, or the disk had the record: of a process and its workers

prepare/               raw files and shards to corpora and indexes
"""
