"""Samples to batches.

The core of both loaders, `RankLoader`, knows which samples a rank is given next, and who reads them:

    open.py         a data.yaml -> Stream; and the validation sets in it, which stay put
    rank_loader.py  `RankLoader`: steps, this rank's share, who reads
    workers.py      who reads ahead: worker processes, or a thread
    parcels.py      a batch from a worker process, in one piece of shared memory

Samples of a stream as tensors:

    loader.py       `StreamLoader`; `StreamDataset`: the stream as a map-style torch dataset
    ahead.py        records of shards, read before they are needed
    cold_pages.py   tokens that are not in memory, asked for before they are needed
    assemble.py     planned samples -> a batch; preference pairs kept apart
    masked.py       documents of which no loss is taken
    batch.py        what a batch is: arrays, the compiled loops that write them, tensors, masks; images.py: its images
    models.py       batches as the arguments of other people's models

Items of any map-style dataset, collated, `DataLoader`:

    data_loader.py  in place of torch's DataLoader: epochs, states; agreement.py: whether all ranks have the same one
    item_options.py what it is given, as sources and the data config of a stream
    item_lengths.py how many tokens each item has; map_style.py: datasets without items by number, refused
    items.py        items as documents of a stream, and read by their places in a batch; item_hash.py: what they hold
    item_batches.py micro-batches of them, read and collated, and the random numbers that are drawn there
    item_places.py  their places in each batch, up to the end of an epoch

A token's label is the next token of its document, also where the document continues in another sample; the last token
of a document has none. So labels never cross a document.
"""
