"""A save, from its marker to the disk, and what becomes of older ones.

    commit.py       from the marker to the pointers: the checkpoint is complete
    rank_files.py   the files of each rank
    durability.py   from complete to durable; `session.durability` does it, in a thread of each machine
    retention.py    a step that is saved again: the save before stays until the new one is durable; and which of the
                    old checkpoints make room
    staging.py      copies to a second storage, in a thread; copying.py: one of them

All of it is for rank 0, but for the forcing of files, which every node does.
"""
