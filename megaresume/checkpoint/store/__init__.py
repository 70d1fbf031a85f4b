"""Checkpoints in an object store: requests, its single writer, and its contents.

objects.py          requests for small objects: listed, read, written, created once, deleted
store.py            uploads and downloads of files
http_session.py     how they are sent; buffer.py: the memory for a part
threads.py          their threads
receipts.py         proof that the store has received what was sent
lease.py            the single writer, and its commits
mirror.py           the contents of a store as a directory; scratch.py: a temporary one
"""
