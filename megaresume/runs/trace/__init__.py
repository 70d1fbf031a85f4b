"""The stream of a run planned again from its records and corpora: what it trained on, what comes next, and proof.

replan.py          the stream of the past and of the future, from the nearest state; its corpora, wherever they are now
points.py          every recorded point of the run compared with it
trace.py           `Trace`: samples as arrays (`Piece`), piece by piece, and which rank and micro-batch they were
                   dealt to
find.py            when a document was or will be seen
by_loss.py         documents by their loss, as a measured run wrote it down
documents.py       documents as the model is shown them: text, pictures
images.py          the pictures of samples as files
formats.py         pieces as text, JSON lines and CSV by a compiled loop, or as a Parquet file
ranks.py           what the ranks wrote down against the stream; hashes of what samples and documents hold
command.py         ``megaresume trace DIR``; ``megaresume verify DIR`` is `megaresume.runs.verify`
"""
