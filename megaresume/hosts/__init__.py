"""The training programs of other people, each as the host of a `megaresume.session.session.Session`.

    deepspeed/   a DeepSpeed engine in the user's own loop: `megaresume.attach`
    megatron/    Megatron-LM and Megatron-DeepSpeed: hooks in their functions
    torch/       a loop of one's own in torch: `megaresume.attach_loop`
    hugging_face/ Hugging Face's Trainer: `megaresume.attach_trainer`
    lightning/   Lightning's Trainer: `megaresume.attach_lightning`
    torchtitan/  torchtitan's Trainer: `megaresume.attach_torchtitan`
    megatron_bridge/ Megatron-Bridge's pretrain and finetune: `megaresume.attach_bridge`
    verl/        VeRL's supervised trainer: `megaresume.attach_verl`
    instances.py methods hooked on one instance, and settings of theirs that are refused
    hooking/     how hooks come into programs that do not know us
    loaders/     other people's loaders (Energon, torchdata), their states in the checkpoint, for both

How to write another one: docs/hosts.md. Importing this package imports neither torch nor DeepSpeed nor Megatron.
"""
