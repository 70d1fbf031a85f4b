"""Text, JSON lines or a directory of files to a Megatron .bin/.idx corpus: parallel, resumable, always the same bytes.

corpus.py       `prepare`: the whole of it
inputs.py       which files, in which order, of which format;
                binary.py refuses what is no text
documents.py    cuts the input into blocks of work; a block's bytes to texts
tokenizers.py   text to token ids
encode.py       one block to one part, in a worker process; workers.py runs them
workdir.py      what is finished, so that a rerun goes on there
merge.py        finished parts to .bin/.idx
"""
