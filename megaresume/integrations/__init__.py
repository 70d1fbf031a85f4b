"""How the stream is attached to other people's training programs: one protocol, and a host for each of them.

    session.py                `Session`: start, load, begin, save, stop, close; the protocol, written once
    host.py                   `Host` and `Data`: what a session is told by what trains, and by what is trained
    saving.py                 `Save`: a save that has begun, to its commit
    resume.py                 what a load reads, what is made of it, and the line that says so
    random_state.py           the generators of a rank in every checkpoint; generators.py: which there are
    claiming.py, shared.py    the directory is this job's alone, and one on all nodes; clocks.py: the clocks agree
    deepspeed.py              `attach`: data for a DeepSpeed engine, its state in every checkpoint
    deepspeed_hooks.py        the engine's methods that carry its data, hooked on the instance
    deepspeed_data.py         `TrainingData`: the micro-batches of a rank, clocked by the optimizer step
    engine_data.py            `EngineData`: what that has in common with other people's loaders
    taken.py                  `Taken`: each step trains the micro-batches that were taken for it, or the run stops
    witness.py                `Witness`: which micro-batches the model's forward was given
    deepspeed_host.py         `EngineHost`: an engine as the host of a session
    deepspeed_engine.py       what an engine says of itself: sizes, ranks, the files that it writes
    in_flight.py              saves of DeepSpeed's decoupled writer: committed behind their last byte
    staged.py                 saves to fast local storage, copied to shared storage behind the training's back
    elastic/                  a ZeRO checkpoint of another number of ranks, converted when it is loaded or beforehand
    loaders/                  other people's loaders (Energon, torchdata), their states in the checkpoint
    settings.py, flags.py     all settings, each declared once; the flags that are made of them
    stop_conditions.py        when to save and exit; stopping.py: how all ranks come to do it at one step
    megatron/                 the hooks in Megatron-LM and Megatron-DeepSpeed: its own docstring is the map
    ranks.py                  one rank decides, all ranks know; one rank fails, all ranks fail
    loadable.py, refusals.py  what cannot be loaded or trained on, and the way out
    explained.py              errors of frameworks and torch on files, in words

Importing this package imports neither torch nor DeepSpeed nor Megatron.
"""
