"""Copies of the checkpoints in a second storage.

stager.py           copies in a thread; session_copies.py: the copies of a session
places.py           where copies go: a directory, or, in store_place.py, an object store
fetch.py            downloads a checkpoint from a store
parts.py            a checkpoint in parts, one on each machine
"""
