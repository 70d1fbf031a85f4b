"""The training programs of other people, each as the host of a `megaresume.checkpoint.session.session.Session`.

    attach.py    `megaresume.attach`: the table of them, and the one call
    deepspeed/   a DeepSpeed engine in the user's own loop
    megatron/    Megatron-LM and Megatron-DeepSpeed: hooks in their functions
    torch/       a loop of one's own in torch
    hugging_face/ Hugging Face's Trainer, and Accelerate
    lightning/   Lightning's Trainer
    torchtitan/  torchtitan's Trainer
    megatron_bridge/ Megatron-Bridge's pretrain and finetune
    verl/        VeRL's supervised trainer, and the prompts of its others
    instances.py methods hooked on one instance, and settings of theirs that are refused
    hooking/     how hooks come into programs that do not know us
    loaders/     other people's loaders (Energon, torchdata), their states in the checkpoint, for both

How to write another one: docs/hosts.md. Importing this package imports neither torch nor DeepSpeed nor Megatron.
"""
