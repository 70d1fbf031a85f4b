"""One training process and the protocol that keeps its data exact, whatever framework trains.

    session.py        `Session`: start, load, begin, save, stop, close; the protocol, written once
    host.py           `Host` and `Data`: what a session is told by what trains, and by what is trained; `Loaded`,
                      `Resume` and `Save`: what it gives back
    settings.py       all settings, each declared once; flags.py: the flags that are made of them
    directory.py      the directories that a run saves to: this job's alone, the same one on all nodes; and their clocks
    durability.py     from complete to durable, in a thread; the files that are loaded are those that were saved
    random_state.py   the generators of every rank, in every checkpoint
    stopping.py       when to save and exit, and how all ranks do it at one step
    ranks.py          one rank decides, all ranks know; one rank fails, all ranks fail
    refusals.py       how a process ends when megaresume refuses something, and how our own programs end
    rank_log.py       what every rank trained, step by step, as it writes it down
    file_errors.py    what a framework says of a file that fails, in words
    retries.py        a save that failed is tried again; then the run continues, or ends

Importing this package imports neither torch nor DeepSpeed nor Megatron.
"""
