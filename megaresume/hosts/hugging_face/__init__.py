"""Hugging Face's Trainer and Accelerate as hosts: `megaresume.attach`.

    attach.py            the first function, and what of a Trainer would be another order
    families.py          other people's Trainers: LLaMA-Factory's, ms-swift's, Axolotl's
    backends.py          DDP, DeepSpeed and FSDP: what differs in their checkpoints
    collators.py         how its items become a batch
    host.py              `TrainerHost`: checkpoints and steps
    hooks.py             the Trainer's own methods, hooked on the instance
    launch.py            the first function, called for scripts that do not know us
    accelerator.py       the second function, and what of an Accelerator's settings would be other data
    accelerated_loop.py  `AcceleratedLoop`, which it returns, and `AcceleratorHost`: checkpoints and steps

Importing this package does not import transformers.
"""
