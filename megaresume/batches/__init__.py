"""Samples to batches.

    open.py       a data.yaml -> Stream; and the validation sets in it, which stay put
    assemble.py   planned samples -> arrays of tokens, labels, loss mask, position ids; preference pairs kept apart
    arrays.py     these arrays, and the compiled loops that write them
    documents.py  image-text documents into the arrays of a batch
    batch.py      arrays -> torch tensors, cu_seqlens, document-diagonal attention mask
    memory.py     a batch from a worker process in one piece of shared memory; where pixels lie
    dataset.py    the stream as a map-style torch dataset; small micro-batches, several read at once
    loader.py     the micro-batches of one rank, read ahead by a thread or by worker processes
    main_guard.py whether the script may start workers that are not forked
    ahead.py      the records of the next micro-batches, read before they are needed
    cold.py       tokens that are not in memory, asked for before they are read
    data_loader.py batches of any map-style dataset, in the place of torch's DataLoader; items/ has its parts
    models/       batches as the arguments of other people's models

A token's label is the next token of its document, also where the document goes on in another sample; the last token
of a document has none. So labels never cross a document.
"""
