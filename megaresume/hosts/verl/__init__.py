"""VeRL's supervised trainer as a host: `megaresume.attach`; and the prompts of its other trainers.

    attach.py   the function, and what of a trainer's settings would be other data
    host.py     `VerlHost`: checkpoints and steps; `Batches`: what it iterates over, in the place of torchdata's loader
    hooks.py    the trainer's own methods, hooked on the instances
    prompts.py  the prompts of reinforcement learning

Importing this package does not import VeRL.
"""
