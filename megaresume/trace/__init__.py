"""What a run trained on, and will: offline, from the records beside its checkpoints and the corpora.

history.py    what the records say: states on the path to the present, layouts, batch sizes
replan.py     the stream of the past and of the future, planned from the nearest state
steps.py      samples to steps, ranks and micro-batches
trace.py      `Trace`: all of these together; samples as arrays (`Piece`), piece by piece
find.py       when a document was or will be seen
formats.py    pieces as text, JSON lines and CSV, by a compiled loop (kernels.py)
decode.py     the text of segments, by the tokenizer of their corpus
parquet.py    pieces as a Parquet file
records.py    which record of which tar shard a document is
pictures.py   an image-text document as the model is shown it
images.py     the pictures of samples as files
"""
