"""Samples to batches.

The core of both loaders, `RankLoader`, decides which samples a rank gets next, and who reads them:

    open.py         a data.yaml -> Stream; and its validation sets, which stay fixed
    rank_loader.py  `RankLoader`: steps, this rank's share, who reads
    workers.py      who reads ahead: worker processes, or a thread
    parcels.py      a batch from a worker process, in one piece of shared memory

Samples of a stream as tensors:

    loader.py       `StreamLoader`; `StreamDataset`: the stream as a map-style torch dataset
    ahead.py        reads records of shards ahead
    cold_pages.py   asks the kernel for tokens that are not in memory before they are read
    assemble.py     planned samples -> a batch; keeps the halves of preference pairs apart
    masked.py       documents excluded from the loss
    batch.py        the parts of a batch: arrays, the compiled loops that write them, tensors, masks; images.py: images
    models.py       batches as arguments of third-party models

Items of any map-style dataset, collated, `DataLoader`:

    data_loader.py  replaces torch's DataLoader: epochs, states; agreement.py: whether all ranks have the same one
    item_options.py its arguments, as sources and the data config of a stream
    item_lengths.py the tokens of each item; map_style.py: refuses datasets without items by number
    items.py        items as documents of a stream, and read by their places in a batch; item_hash.py: their contents
    item_batches.py micro-batches of items, read and collated, and the random numbers drawn there
    item_places.py  the places of a batch's items, up to the end of an epoch

A token's label is the next token of its document, even if the document continues in another sample; a document's last
token has none. So labels never cross a document boundary.
"""
