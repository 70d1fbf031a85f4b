"""`megaresume prepare`: builds corpora and indexes; parallel, resumable, with the same bytes every time.

Text, rows of JSON or Parquet, or a directory to a Megatron .bin/.idx corpus
corpus.py            `prepare`, the entry point; chat.py: options for conversations
blocks.py            splits the input into blocks of work, and into stretches for several machines (--part)
encode.py            blocks to parts, in worker processes; parts to .bin/.idx (or .places) and .spans

Image-text records to a .shards.idx
shards.py            `prepare_shards`: tar shards, or an image folder, to an index; joins indexes of several machines
measure.py           one shard to a part; parts to the index

command.py           its flags; command_shards.py: those for tar shards
work.py              finished parts, from which a rerun continues; worker processes
"""
