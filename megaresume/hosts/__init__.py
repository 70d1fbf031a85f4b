"""The training programs of other people, each as the host of a `megaresume.checkpoint.session.session.Session`.

    attach.py    `megaresume.attach`: the table of them, and the one call

    count.py     the promise: each step trains the micro-batches that were taken for it, once
    steps.py     `Steps`: a rank's micro-batches under that count; feeds.py: where they come from
    trainer.py   `TrainerHost`: a trainer as a host, declared
    instances.py methods hooked on one instance, and settings that are refused
    shares.py    whether the loaders of all processes are those of all ranks
    contract.py  `HostContract`: what every host must do, as tests for people who write one; driver.py: its runs
    prompts.py   `Prompts`: those of reinforcement learning, each trained once in whatever order rollouts end
    files.py     checkpoints by torch.distributed.checkpoint, also in the background, or in one file

One file a trainer:

    loop.py            a custom loop in torch
    hugging_face.py    Hugging Face's Trainer; hugging_face_data.py: what it trains; hugging_face_launch.py: for scripts
                       that do not know us
    accelerate.py      a loop with Accelerate; accelerate_backends.py: DDP, DeepSpeed and FSDP, also under the Trainer
    lightning.py       Lightning's Trainer; lightning_settings.py: what is refused; lightning_links.py: its own paths
    torchtitan.py      torchtitan's Trainer
    verl.py            VeRL's supervised trainer, and the prompts of its others
    megatron_bridge/   Megatron-Bridge's pretrain and finetune
    deepspeed/         a DeepSpeed engine in the user's own loop
    megatron/          Megatron-LM and Megatron-DeepSpeed: hooks in their functions
    loaders/           other people's loaders (Energon, torchdata), their states in the checkpoint, for both
    hooking/           how hooks come into programs that do not know us

How to write another one: docs/hosts.md. Importing this package imports neither torch nor DeepSpeed nor Megatron.
"""
