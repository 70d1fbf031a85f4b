"""A DeepSpeed engine as the host of a session.

attach.py          data for an engine, its state in every checkpoint; the hooks on the engine's methods
host.py            `EngineHost`
engine.py          facts about an engine: sizes, ranks, the files that it writes
engine_data.py     `EngineData`: its data, clocked by its optimizer steps
witness.py         `Witness`: which micro-batches had a forward and a backward
item_data.py       `ItemData`, from a `megaresume.DataLoader`
training_data.py   `TrainingData`, from a stream; `AttachedLoader`, for third-party loaders
decoupled.py       saves by DeepSpeed's decoupled writer: committed after their last byte
load_rules.py      the requirements for loading a checkpoint; the universal checkpoint beside it
conversion.py      how that is made: `megaresume convert`
elastic.py         what a load does with a checkpoint from another number of ranks
"""
