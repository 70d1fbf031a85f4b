"""The demo: the main job end to end on one machine, with proof.

command.py       its flags; the demo from beginning to end; its report, one self-contained HTML page
demo.py          the parts of a demo, and the text demo: text of the Python installation, as three corpora
vlm.py           pictures of handwritten digits from a package, as tar shards
sft.py           conversations and text in one blend, the program that trains on them, and which tokens it trained
hugging_face.py  the text as map-style datasets, and a program that trains on them with Hugging Face's Trainer
"""
