"""Checkpoints in an object store: its requests, its one writer, and what it holds.

objects.py          the requests: small objects, listed, read, written, created once, deleted
store.py            and files, up and down
http_session.py     how they are sent; buffer.py: the memory of a part
threads.py          in threads
receipts.py         it has what was sent
lease.py            the one writer, and its commits
mirror.py           what a store holds, as a directory; scratch.py: a temporary one
"""
