"""Samples to batches.

    open.py       a data.yaml -> Stream
    assemble.py   planned samples -> arrays of tokens, labels, loss mask, position ids
    batch.py      arrays -> torch tensors, cu_seqlens, document-diagonal attention mask
    dataset.py    the stream as a map-style torch dataset
    loader.py     the micro-batches of one rank, read ahead by a thread or by worker processes
    together.py   small micro-batches of text, several read at once
    ahead.py      the records of the next micro-batches, read before they are needed
    cold.py       tokens that are not in memory, asked for before they are read
    parcel.py     a batch from a worker process in one piece of shared memory
    data_loader.py batches of any map-style dataset, in the place of torch's DataLoader; items/ has its parts
    pairs.py      preference pairs: where chosen and rejected conversations are, and that they stay apart
    documents.py  image-text documents into the arrays of a batch
    pixels.py     where pixels of a batch lie, and how they come from a worker process
    validation.py validation sets that stay put
    models/       batches as the arguments of other people's models

A token's label is the next token of its document, also where the document goes on in another sample; the last token
of a document has none. So labels never cross a document.
"""
