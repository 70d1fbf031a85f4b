"""Text, rows of JSON or Parquet, or a directory to a Megatron .bin/.idx corpus: parallel, resumable, always the same.

corpus.py       `prepare`: the whole of it; chat.py: what is said of conversations
inputs.py       which files, in which order, of which format
streams.py      a file opened and decompressed; what is no text is refused
tables.py       rows of Parquet and Arrow as JSON lines; row_lines.py: arrays of JSON, and CSV
blocks.py       the input in blocks of work, and in stretches for several machines (--part)
documents.py    the bytes of a block as texts, or conversations
conversations/  conversations to tokens, and to spans of trained tokens
tokens.py       documents to tokens; tokenizers.py: text to token ids
encode.py       one block to one part, in a worker process; and which blocks have none yet
parts.py        finished parts, and .bin/.idx (or .places) and .spans of them
work.py         what is finished, so that a rerun goes on there; worker processes
"""
