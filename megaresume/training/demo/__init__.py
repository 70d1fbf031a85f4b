"""The demo: the main job end to end on one machine, with proof.

corpus.py    real text that every machine has, as corpora
plan.py      what is run: the uninterrupted twin, and the run that is killed
compare.py   every step of the run against the twin
report.py    one self-contained HTML page
"""
