"""Files beside the model files: written, and read back.

names.py            names and paths
sealed.py           sealed JSON, the format of records
envelope.py         `DataState`, and its envelope
step_file.py        the data state of a step, and what it belongs to
marker.py           a save of a step has begun and not ended
manifest.py         every file, its size and checksum
rank_files.py       the files that each rank adds
pointers.py         what ``latest`` and the tracker name
ledger.py           one line for every checkpoint, start and end
prompt_ledger.py    what happened to every prompt
rank_log.py         what every rank trained in each step, as recorded by itself
staging_note.py     where the checkpoints of a root are copied to
position.py         the position of a run between two saves
branches.py         which save follows which, and which branches were abandoned
candidates.py       which checkpoints exist, and whether each is complete
"""
