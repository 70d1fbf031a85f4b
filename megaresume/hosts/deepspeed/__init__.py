"""A DeepSpeed engine as the host of a session.

attach.py          data for an engine, its state in every checkpoint; the hooks on the engine's methods
host.py            `EngineHost`
engine.py          what an engine says of itself: sizes, ranks, the files that it writes
engine_data.py     `EngineData`: its data, clocked by its optimizer steps
witness.py         `Witness`: which micro-batches a forward and a backward went through
item_data.py       `ItemData` of a `megaresume.DataLoader`
training_data.py   `TrainingData` of a stream, `AttachedLoader` of other people's loaders
decoupled.py       saves of DeepSpeed's decoupled writer: committed after their last byte
load_rules.py      what a checkpoint must be to be loaded; the universal checkpoint beside it
conversion.py      how that is made: `megaresume convert`
elastic.py         what a load does about a checkpoint of another number of ranks
"""
