"""The stream as the data of a Megatron program.

streams.py      flags -> streams
iterators.py    around build_train_valid_test_data_iterators; a log of what every process was handed
provider.py     streams -> datasets
form.py         which keys get_batch expects
samples.py      samples with these keys; `RankDeal`: balanced ranks, which sample lies at a place of the sampler
order.py        the stream as what a checkpoint saves
loaders.py      other people's loaders in its place
"""
