"""A save: from its marker to a checkpoint that a power cut cannot take away.

commit.py       from the marker to the pointers: the checkpoint is complete
forcing.py      from complete to durable: files forced to the disks, checksums in the manifest
durability.py   that in the background, by a thread of each machine
retries.py      a save that failed is tried again
retention.py    a step that is saved again; which of the old checkpoints make room
"""
