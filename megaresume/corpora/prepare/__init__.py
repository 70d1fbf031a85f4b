"""Text, JSON lines or a directory of files to a Megatron .bin/.idx corpus: parallel, resumable, always the same bytes.

corpus.py       `prepare`: the whole of it
inputs.py       which files, in which order, of which format; directories.py finds those below a directory
blocks.py       cuts the input into blocks of work; documents.py: a block's bytes to texts
tokenizers.py   text to token ids
encode.py       one block to one part, in a worker process; workers.py runs them
parts.py        finished blocks; workdir.py: what is finished, so that a rerun goes on there
merge.py        finished parts to .bin/.idx
"""
