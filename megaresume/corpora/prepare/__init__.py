"""Text, rows of JSON or Parquet, or a directory to a Megatron .bin/.idx corpus: parallel, resumable, always the same.

corpus.py       `prepare`: the whole of it; chat.py: what is said of conversations
inputs.py       which files, in which order, of which format;
                binary.py refuses what is no text; parquet.py, arrow.py: rows as JSON lines
documents.py    cuts the input into blocks of work; a block's bytes to texts, or conversations
conversations/  conversations to tokens, and to spans of trained tokens
tokens.py       documents to tokens; tokenizers.py: text to token ids
stretches.py    where each of several machines (--part) starts and stops
encode.py       one block to one part, in a worker process; blocks.py: which of them; workers.py runs them
workdir.py      what is finished, so that a rerun goes on there
merge.py        finished parts to .bin/.idx (or .places) and .spans
"""
