"""Megatron-Bridge, which NeMo trains with, as a host: `megaresume.attach`.

    attach.py    the function, and what of a config would be other data
    host.py      `BridgeHost`: checkpoints and steps, and the text that carries the data state in them
    run.py       `Run`: one process; opened as soon as its ranks are known
    manager.py   `Manager`: a checkpoint manager by Bridge's own protocol, called between any two steps; `Provider`: a
                 dataset provider by Bridge's own contract

Nothing of Bridge is patched. Importing this package imports neither Bridge nor Megatron: `attach.attach` does.
"""
