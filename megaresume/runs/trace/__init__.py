"""Plans a run's stream again from its records and corpora: what it trained on, what comes next, and proof.

replan.py          plans the past and the future from the nearest state; opens the corpora, wherever they are now
points.py          compares every recorded point of the run with the result
trace.py           `Trace`: samples as arrays (`Piece`), piece by piece, and the rank and micro-batch of each
find.py            when a document was or will be seen
by_loss.py         documents ranked by the loss that a measured run recorded
documents.py       documents as the model sees them: text, pictures
images.py          the pictures in samples as files
formats.py         pieces as text, JSON lines and CSV by a compiled loop, or as a Parquet file
ranks.py           compares the ranks' records with the stream; hashes the contents of samples and documents
command.py         ``megaresume trace DIR``; ``megaresume verify DIR`` is `megaresume.runs.verify`
"""
