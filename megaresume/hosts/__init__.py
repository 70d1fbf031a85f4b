"""Other people's training programs, each as the host of a `megaresume.checkpoint.session.Session`.

    attach.py    `megaresume.attach`: the table of trainers, and the one call; its hooks and refusals
    options.py   errors about options that a trainer does not have, or that are missing
    count.py     the promise: each step trains the micro-batches that were taken for it, once
    steps.py     `Steps`: that count, for a trainer that iterates over them
    feeds.py     where micro-batches come from; whether those of all ranks form one run; parallelism.py: whether they
                 suit how models are divided
    trainer.py   `TrainerHost`: a trainer as a host, declared
    prompts.py   `Prompts`: those of reinforcement learning, each trained once in whatever order rollouts end;
                 prompt_order.py: the item of each; tickets.py: identifies a returning rollout
    files.py     checkpoints by torch.distributed.checkpoint, also in the background, or in one file;
                 optimizer_states.py: an optimizer in them; replicas.py: whether what they save once is equal on all
                 ranks; unsaved.py: learning rates that they lack, or save too early
    frozen.py    whether weights that a checkpoint lacks are trained, and those of the run
    contract.py  `HostContract`: what every host must do, as tests for authors of hosts; driver.py: its runs

One file per trainer:

    loop.py            a custom loop in torch
    hugging_face.py    Hugging Face's Trainer; hugging_face_data.py: its data; hugging_face_epochs.py: their length;
                       hugging_face_weights.py: weights that checkpoints lack, or have under other names;
                       hugging_face_families.py: trainers derived from it; hugging_face_launch.py: for scripts
                       that do not know us
    trl.py             TRL's asynchronous GRPO: its prompts
    accelerate.py      a loop with Accelerate; accelerate_backends.py: DDP, DeepSpeed and FSDP, also under the Trainer
    lightning.py       Lightning's Trainer; lightning_trainer.py: its settings, its callback, the paths that it saves to
    torchtitan.py      torchtitan's Trainer
    torchft.py         torchft's replicas, which leave and join while the run continues; torchft_steps.py: a step, from
                       quorum to commit; torchft_dealing.py: who trains which part of it, and whether it counts;
                       torchft_dealt.py: what one replica reads and records of it; torchft_local_sgd.py: LocalSGD and
                       DiLoCo; torchft_lanes.py: one of their outer steps
    verl.py            VeRL's supervised trainer
    verl_prompts.py    VeRL's reinforcement learning: its prompts; verl_issued.py: what it iterates over and saves;
                       verl_separate.py: its trainers that do rollouts in parallel with training
    megatron_bridge.py Megatron-Bridge's pretrain and finetune; megatron_bridge_manager.py: by its own protocols
    deepspeed/         a DeepSpeed engine in the user's own loop
    megatron/          Megatron-LM and Megatron-DeepSpeed: hooks in their functions
    endless.py         a DataLoader under trainers that only count steps: DeepSpeed's engine, Megatron
    loaders.py         other people's loaders (Energon, torchdata), for both; loader_states.py: in the checkpoint;
                       loader_order.py: those that lose their order
    writers.py         processes that write for a rank end with it
    token_losses.py    the loss of each label without a call, from the logits of a model
    importing.py       hooks for programs that do not know us; startup/: for processes that they start

Which checkpoint a resume loads is not decided here: each host calls `Session.load` or `Session.choose`, and rank 0
chooses for all (`megaresume.checkpoint.chooser`) by the rules of `megaresume.checkpoint.load.search`.

To write another one, see docs/hosts.md. Importing this package imports neither torch nor DeepSpeed nor Megatron.
"""
