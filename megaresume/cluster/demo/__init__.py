"""The demo: the main job end to end on one machine, with proof.

run.py       the demo from beginning to end
scenario.py  what differs between the demos; what small models have in common
text.py      text that every Python installation has, as three corpora
vlm.py       pictures of handwritten digits that a package has, as tar shards
sft.py       conversations and text in one blend, and the program that trains on them
masks.py     which tokens were trained, by code of its own
items.py     that text as map-style datasets, for Hugging Face's Trainer; trainer.py: the program that trains on them
report.py    one self-contained HTML page
"""
