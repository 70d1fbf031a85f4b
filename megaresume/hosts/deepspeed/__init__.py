"""A DeepSpeed engine as the host of a session.

attach.py          data for an engine, its state in every checkpoint
hooks.py           the hooks on the engine's methods
host.py            `EngineHost`
engine.py          what an engine says of itself: sizes, ranks, the files that it writes
training_data.py   `TrainingData`: the micro-batches of a rank, clocked by the optimizer step
loaders.py         other people's loaders for an engine
engine_data.py     `EngineData`: what that has in common with other people's loaders
witness.py         which micro-batches the model was given
decoupled.py       saves of DeepSpeed's decoupled writer: committed after their last byte
elastic/           a ZeRO checkpoint of another number of ranks, converted when it is loaded or beforehand
"""
