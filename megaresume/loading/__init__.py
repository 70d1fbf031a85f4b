"""Samples to batches.

    open.py       a data.yaml -> Stream
    assemble.py   planned samples -> arrays of tokens, labels, loss mask, position ids (kernels.py does the copying)
    batch.py      arrays -> torch tensors, cu_seqlens, document-diagonal attention mask
    dataset.py    the stream as a map-style torch dataset
    loader.py     the micro-batches of one rank, read ahead by a thread or by worker processes

A token's label is the next token of its document, also where the document goes on in another sample; the last token
of a document has none. So labels never cross a document.
"""
