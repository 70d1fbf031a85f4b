"""What is written beside the model files, and read back.

names.py            names and paths
sealed.py           sealed JSON, the format of records
envelope.py         `DataState`, and the envelope that it travels in
step_file.py        the data state of a step, and what it belongs to
marker.py           a save of a step has begun and has not ended
manifest.py         every file, its size and checksum
rank_files.py       the files that each rank adds
pointers.py         what ``latest`` and the tracker name
ledger.py           one line for every checkpoint, start and end
prompt_ledger.py    what became of every prompt
rank_log.py         what every rank trained, step by step, as it writes it down
position.py         how far a run has come between two saves
branches.py         which save follows which, and what was given up
candidates.py       which checkpoints are there, and is this one whole?
"""
