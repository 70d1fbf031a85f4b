"""Proofs from records: what a run says that it did, against what planning it again gives.

losses.py    the losses of a run, from any log of it, and two runs compared
ranks.py     what every rank trained, step by step, as it writes it down; rank_records.py reads it
past.py      the samples of a run's past, planned again from any recorded point
content.py   hashes of what samples hold: tokens, or the records of image-text sources
points.py    the recorded points of a run, planned again through them
check.py     the log of ranks against the planned stream
"""
