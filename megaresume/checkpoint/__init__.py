"""Checkpoints: the records beside the model files, how a save becomes valid, and what is loaded after a kill.

    save                                                     load
    ----                                                     ----
    rank 0  make_room         a save of this step goes aside rank 0  put_back        what it has left of that
            begin_save        -> marker                              choose          -> Choice
    all     model files                                      rank 0  tells the others its Choice
    all     barrier                                          others  confirm_choice  -> the same state, or an error
    rank 0  commit_save                                      rank 0  record_start    -> ledger line
              every expected file there, none empty?
              step_0000010.json            data state
              step_0000010.manifest.json   every file with its size: from here the checkpoint is complete
              latest, latest_checkpointed_iteration.txt
              ledger.jsonl                 one line
              marker removed
    every node, in the background: files forced to the disk, checksums taken
    rank 0  the manifest again: from here the checkpoint is durable; old ones make room

Why it is correct:

- Each of our files is replaced atomically (`megaresume.files`) and carries a checksum of its own bytes (sealed).
- The **manifest** says that a checkpoint is complete; the pointers only say which one was meant. DeepSpeed moves its
  own ``latest`` before the other ranks are done, so a pointer proves nothing.
- The **marker** tells a save that was killed from a directory that somebody wrote without us, and pointers that a
  kill kept from moving from pointers that were moved back on purpose.
- State, manifest and marker carry the id of their save; state and ledger the id of the run: nothing of another save
  or run passes for one of this.
- Values are captured by `begin_save`, so that a finalizer may commit them long after training has continued.
- A choice comes with the reason for every checkpoint that was passed over. Records of a newer megaresume stop the
  resume: they never look like damage.

A save, and the next start::

    pending = begin_save(save, tag="global_step10", iteration=10, state=state, topology=topology)
    engine.save_checkpoint(save, tag="global_step10", save_latest=False)      # all ranks, then a barrier
    commit_save(pending, expected_files=["mp_rank_00_model_states.pt", ...])

    choice = choose(load)                                                      # rank 0
    step = confirm_choice(load, choice)                                        # the others
    record_start(save, iteration=choice.iteration, state=choice.state, choice=choice)

Files, in the order of a save and of a load:

    session.py          `Session`: start, load, begin, save, stop, close; the protocol, written once
    host.py             `Host` and `Data`: the interfaces of a trainer, and of its data, to a session
    settings.py         all settings, each declared once; flags.py: the flags that are made of them
    ranks.py            one rank decides, all ranks know; one fails, all ranks fail; ending.py: how a process ends then
    roots.py            the directories of a process: named alike, locked, with their copies
    lock.py             one job at a time, in a directory that all ranks see; claim.py: which job
    commit.py           a save, from the marker to the pointers: the checkpoint is complete
    durability.py       from complete to durable, in a thread of each machine
    retention.py        a step that is saved again; which of the old checkpoints make room
    staging.py          copies to a second storage, in a thread; staged.py: of a session
    places.py           where copies go: a directory, or, in store_place.py, an object store
    nodes.py            machines without a directory in common; parts.py: a checkpoint in parts, one on each of them
    store.py            the requests to an object store; receipts.py: it has what was sent; workers.py: in threads
    http_session.py     how they are sent; buffer.py: the memory of a part
    lease.py            the one writer of an object store, and its commits
    mirror.py           what an object store holds, as a directory (scratch.py: a temporary one)
    fetch.py            a checkpoint of a store, brought here
    candidates.py       which checkpoints are there, is this one whole, what do the pointers name?
    search.py           the rules of a choice
    choose.py           of one root or of two, the same on all ranks; the beginning and the end of a run
    file_errors.py      files that fail: in words, tried again, compared with what was saved
    replay.py           a process that trains steps of another run again: loads from there, and saves nothing
    stopping.py         when to save and exit, and how all ranks do it at one step
    random_state.py     the generators of every rank, in every checkpoint

and what they write and read:

    records.py          names and paths; sealed JSON, the format of records
    step_file.py        data state and marker of a step
    manifest.py         every file, its size and checksum; the files of each rank
    ledger.py           one line for every checkpoint, start and end; prompt_ledger.py: what became of every prompt
    branches.py         which save follows which, and what was given up
    position.py         how far a run has come between two saves
    goodput.py          what became of the time of a run
    meter/              live figures while it trains: what, by source and by document; figures.py: those of a session
    rank_log.py         what every rank trained, step by step, as it writes it down
    system.py           time, process, mounts, how a run is laid out; dead locks of builds
    foreign.py          checkpoints of other programs; foreign_layouts.py: of each of them

Only random_state.py and meter/losses.py import torch, and no file of a checkpoint is unpickled here. Importing this
package imports neither torch nor DeepSpeed nor Megatron.
"""
