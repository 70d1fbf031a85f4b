"""Hugging Face's Trainer as a host: `megaresume.attach_trainer`.

    attach.py   the function, and what of a Trainer's settings would be another order
    host.py     `TrainerHost`: checkpoints and steps
    hooks.py    the Trainer's own methods, hooked on the instance

Importing this package does not import transformers.
"""
