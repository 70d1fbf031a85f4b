"""`megaresume prepare`: parallel, resumable, always the same.

Text, rows of JSON or Parquet, or a directory to a Megatron .bin/.idx corpus
corpus.py            `prepare`: the whole of it; chat.py: what is said of conversations
blocks.py            the input in blocks of work, and in stretches for several machines (--part)
encode.py            blocks to parts, in worker processes; and .bin/.idx (or .places) and .spans of them

Image-text records to a .shards.idx
shards.py            `prepare_shards`: tar shards, or an image folder, to an index; indexes of several machines to one
measure.py           one shard to a part; parts to the index

command.py           its flags; command_shards.py: of tar shards
work.py              what is finished, so that a rerun continues there; worker processes
"""
