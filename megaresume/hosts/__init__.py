"""The training programs of other people, each as the host of a `megaresume.checkpoint.session.Session`.

    attach.py    `megaresume.attach`: the table of them, and the one call; what it hooks and refuses
    options.py   what is said about an option of it that a trainer does not have, or that is missing
    count.py     the promise: each step trains the micro-batches that were taken for it, once
    steps.py     `Steps`: that count, for a trainer that takes them by a ``for``
    feeds.py     where they come from; whether those of all ranks make one run
    trainer.py   `TrainerHost`: a trainer as a host, declared
    prompts.py   `Prompts`: those of reinforcement learning, each trained once in whatever order rollouts end;
                 prompt_order.py: which item each is; tickets.py: what comes back with a rollout
    files.py     checkpoints by torch.distributed.checkpoint, also in the background, or in one file; replicas.py: is
                 what they hold once alike on every rank; left_out.py: learning rates that they do not hold, or
                 hold too early
    contract.py  `HostContract`: what every host must do, as tests for people who write one; driver.py: its runs

One file a trainer:

    loop.py            a custom loop in torch
    hugging_face.py    Hugging Face's Trainer; hugging_face_data.py: what it trains; hugging_face_epochs.py: how long
                       that is; hugging_face_families.py: trainers made of it; hugging_face_launch.py: for scripts that
                       do not know us
    trl.py             TRL's asynchronous GRPO: its prompts
    accelerate.py      a loop with Accelerate; accelerate_backends.py: DDP, DeepSpeed and FSDP, also under the Trainer
    lightning.py       Lightning's Trainer; lightning_trainer.py: its settings, its callback, the paths that it saves to
    torchtitan.py      torchtitan's Trainer
    torchft.py         replicas of torchft, which leave and join while the run goes on; torchft_steps.py: a step, from
                       its quorum to its commit; torchft_dealing.py: who trains what of it, and whether it counts;
                       torchft_dealt.py: what one replica reads of it and writes down; torchft_local_sgd.py: LocalSGD
                       and DiLoCo; torchft_lanes.py: an outer step of theirs
    verl.py            VeRL's supervised trainer
    verl_prompts.py    VeRL's reinforcement learning: its prompts; verl_issued.py: what it iterates over and saves;
                       verl_separate.py: its trainers that roll out beside the training
    megatron_bridge.py Megatron-Bridge's pretrain and finetune; megatron_bridge_manager.py: by its own protocols
    deepspeed/         a DeepSpeed engine in the user's own loop
    megatron/          Megatron-LM and Megatron-DeepSpeed: hooks in their functions
    endless.py         a DataLoader under those that count steps alone: DeepSpeed's engine, Megatron
    loaders.py         other people's loaders (Energon, torchdata), for both; loader_states.py: in the checkpoint;
                       loader_order.py: those that lose their order
    token_losses.py    the loss of each label without a call, from the logits of a model
    importing.py       how hooks come into programs that do not know us; startup/: into those that they start

How to write another one: docs/hosts.md. Importing this package imports neither torch nor DeepSpeed nor Megatron.
"""
