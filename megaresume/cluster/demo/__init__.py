"""The demo: the main job end to end on one machine, with proof.

command.py       its flags; the demo from beginning to end; its report, one self-contained HTML page
demo.py          what a demo is, and that of text, which every Python installation has, as three corpora
vlm.py           pictures of handwritten digits that a package has, as tar shards
sft.py           conversations and text in one blend, the program that trains on them, and which tokens it trained
hugging_face.py  that text as map-style datasets, and the program that trains on them: Hugging Face's Trainer
"""
