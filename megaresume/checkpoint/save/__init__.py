"""A save: from its marker to a checkpoint that a power cut cannot take away.

commit.py       from the marker to the pointers: the checkpoint is complete
durability.py   from complete to durable, in a thread of each machine
retries.py      a save that failed is tried again
retention.py    a step that is saved again; which of the old checkpoints make room
"""
