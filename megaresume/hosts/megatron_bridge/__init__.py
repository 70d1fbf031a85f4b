"""Megatron-Bridge, which NeMo trains with, as a host: `megaresume.attach`.

    host.py      `attach`; `BridgeHost`: opened as soon as the ranks of a run are known, and the text that carries the
                 data state in its checkpoints
    manager.py   `Manager`: a checkpoint manager by Bridge's own protocol, called between any two steps; `Provider`: a
                 dataset provider by Bridge's own contract

Nothing of Bridge is patched. Importing this package imports neither Bridge nor Megatron: `host.attach` does.
"""
