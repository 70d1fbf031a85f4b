"""Hugging Face's Trainer and Accelerate as hosts: `megaresume.attach_trainer`, `megaresume.attach_accelerator`.

    attach.py            the first function, and what of a Trainer's settings would be another order
    host.py              `TrainerHost`: checkpoints and steps
    hooks.py             the Trainer's own methods, hooked on the instance
    accelerator.py       the second function, and what of an Accelerator's settings would be other data
    accelerated_loop.py  `AcceleratedLoop`, which it returns, and `AcceleratorHost`: checkpoints and steps

Importing this package does not import transformers.
"""
