"""A training loop of one's own in torch as a host: `megaresume.attach`; and what other loops share with it.

host.py        what the hosts of trainers and loops have in common
loop.py        the function, `Loop`, which it returns, and `LoopHost`
files.py       what is in a checkpoint: torch.distributed.checkpoint, in the foreground or background, or one file
background.py  `Background`: a save that is written while training goes on
steps.py       `Steps`: each step trains the micro-batches that were taken for it, or the run stops
feeds.py       the data: `Items` of a `megaresume.DataLoader`, `Samples` of a `megaresume.StreamLoader`
shares.py      whether the loaders of all processes are those of all ranks
"""
