"""The stream of a run planned again, from its records and its corpora: what it trained on, will train on, and proof.

replan.py          the stream of the past and of the future, from the nearest state; its corpora, wherever
                   they are now
trace.py           `Trace`: samples as arrays (`Piece`), piece by piece, and which rank and micro-batch they were
                   dealt to
find.py            when a document was or will be seen
shard_records.py   which record of which tar shard a document is
documents.py       documents as the model is shown them: text, pictures
images.py          the pictures of samples as files
formats.py         pieces as text, JSON lines and CSV by a compiled loop, or as a Parquet file
verify.py          every recorded point of a run, and its corpora as they are now: planned again and compared
rank_check.py      what the ranks wrote down against the stream
content.py         hashes of what samples and documents hold
"""
