"""A save: from its marker to a checkpoint that survives a power cut.

commit.py       from the marker to the pointers: the checkpoint is complete
forcing.py      from complete to durable: files forced to the disks, checksums in the manifest
durability.py   does that in the background, by a thread on each machine
retries.py      retries a failed save
retention.py    a step that is saved again; which old checkpoints are removed
"""
