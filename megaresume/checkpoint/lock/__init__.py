"""One job at a time writes to a directory.

lock.py     the lock: taken, renewed, checked before every write; and what only its owner may write: data state,
            manifest, pointers
shared.py   whether all ranks see the directory
claim.py    which job it belongs to, and whether that job is gone
"""
