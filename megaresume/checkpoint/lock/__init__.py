"""One job at a time writes to a directory.

lock.py     the lock: taken, renewed, checked before every write; and a directory that all ranks see
claim.py    which job it belongs to, and whether that job is gone
fenced.py   what the owner alone may write: data state, manifest, pointers
"""
