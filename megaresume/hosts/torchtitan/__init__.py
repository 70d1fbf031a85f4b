"""torchtitan's Trainer as a host: `megaresume.attach`.

    attach.py  the function, and what of a Trainer's settings would be other data
    host.py    `TitanHost`: checkpoints and steps, and the text that carries the data state in them
    hooks.py   the Trainer's and its CheckpointManager's own methods, hooked on the instances

Importing this package does not import torchtitan.
"""
