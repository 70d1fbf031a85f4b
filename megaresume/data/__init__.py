"""Documents and records: where they are, how long they are, what they contain.

How a document becomes tokens in a batch: catalog.py opens its `Source`; `megaresume.stream` plans by lengths alone
which of its tokens stand in which sample (`Plan`); `megaresume.batches.assemble` reads just those, from the array of a
`TokenSource` in one compiled loop, from any other source by ``read``, and of a `DocumentSource` the whole document.

Opening what a data config names
catalog.py             name -> ``{path, kind, split, ...}`` to name -> `Source`
held_out.py            do sources share documents? was held-out data trained on?
data_config.py         data.yaml, its mapping, or ``--data-path``: read once
data_path.py           ``--data-path``, as Megatron reads it
metadatasets.py        Energon's metadatasets as sources
shard_options.py       ``kind: webdataset``, ``image_folder`` and ``energon``

Sources
source.py              `Source`: the interface of every source; its fingerprint
python_source.py       any object with __len__, length(i), get(i) as a source; items of a dataset by number alone
split.py               `open_corpus`; `RangeSource`: the train, valid or test part of a source, as ``--split`` cuts it

Documents of text: a Megatron .bin/.idx corpus, or an .idx and raw files
indexed_documents.py   `IndexedDocuments`: documents whose lengths are in an .idx
row_source.py          `RowSource`: rows of raw files by their places, each compared with the index
layout.py              the bytes of .bin/.idx, for reader and writer; kernels.py reads their arrays
spans.py               the bytes of .spans, for reader and writer: which tokens are trained
sidecar.py             ``<prefix>.megaresume.json`` and .pieces: cached results; did files change?

Raw files of text
inputs.py              which files, in which order, in which format; braces, wildcards, URLs to a list of shards
streams.py             opens and decompresses a file, or unpacks it once per machine; refuses what is not text
row_lines.py           rows of Parquet, Arrow, CSV and arrays of JSON as JSON lines; the places of lines
documents.py           the bytes of a file as texts, or conversations; and as tokens

Image-text records: in tar shards, as webdataset and Energon have them, or in JSON lines and a folder of images
shard_source.py        `ShardSource`: records as documents
record_index.py        ``NAME.shards.idx``, and ``.places`` of rows: where records are, and how to compare them
tar.py                 members to records, and the damage that archives can have
image_folder.py        rows of JSON lines, with the images that they name, to records
energon.py             ``.nv-meta`` of an Energon data set, and its field map

Bytes from disks and object stores
shard_files.py         range reads of local files and object stores
read_ahead.py          reads what comes next before it is needed
remote.py              requests to object stores, retried with back-off
disk_cache.py          their results on a local disk, for the next epoch
s3_ranges.py           ranges of S3 by obstore, in less processor time than s3fs takes
store_counts.py        how often a request was retried, or the disk cache had the record: per process and its workers

prepare/               raw files and shards to corpora and indexes
"""
