"""What is written beside the model files, and read back: one module for each kind of record.

names.py            names and paths; sealed JSON, the format of records
step_file.py        data state and marker of a step
manifest.py         every file, its size and checksum; the files of each rank
ledger.py           one line for every checkpoint, start and end
prompt_ledger.py    what became of every prompt
rank_log.py         what every rank trained, step by step, as it writes it down
position.py         how far a run has come between two saves
branches.py         which save follows which, and what was given up
candidates.py       which checkpoints are there, is this one whole, what do the pointers name?
"""
