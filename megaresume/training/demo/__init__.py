"""The demo: the main job end to end on one machine, with proof.

text.py      the demo of text                          corpus.py    real text that every machine has, as corpora
vlm.py       the demo of images                        digits.py    real images that a package has, as tar shards
scenario.py  what differs between them, and so what a further one would need
plan.py      how the training program is started: the uninterrupted twin, and the run that is killed
run.py       the demo from beginning to end            commands.py  commands of the program
report.py    one self-contained HTML page
"""
