"""Checkpoints: the records beside the model files, how a save becomes valid, and what is loaded after a kill.

    save                                                     load
    ----                                                     ----
    rank 0  make_room         an older save moves aside rank 0  put_back        what it has left of that
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

Where things are, from top to bottom; each imports only from those below it (`lint-imports`):

    session.py          `Session`: start, load, begin, save, stop, close; the protocol, written once
    settings.py         all settings, each declared once
    chooser.py          what all ranks load: rank 0 decides, every rank sees the same there
    starter.py          a start goes into the ledger of every root, on all nodes, before the first save there
    saver.py            the files of a checkpoint are written, and then it counts
    metrics/            live figures while it trains, and what became of the time of a run
    roots.py            the directories of a process: named alike, locked, with their copies
    starts.py           the beginning and the end of a run: a start is recorded, checked, and tidies up
    copies/             copies of the checkpoints in a second storage
    host.py             `Host` and `Data`: the interfaces of a trainer, and of its data, to a session
    file_errors.py      what a framework says of files that it cannot read or write, in words
    random_state.py     the generators of every rank, in every checkpoint; generators.py: those of a process
    save/               from the marker to the pointers, from complete to durable; old ones make room
    load/               what is loaded; checkpoints of other programs
    store/              the requests to an object store, its one writer, what it holds
    nodes.py            machines without a directory in common
    lock/               one job at a time, in a directory that all ranks see
    stopping.py         when to save and exit, and how all ranks do it at one step
    ending.py           how a process ends when one of them has failed
    meetings.py         ranks wait for each other without a collective: one that is gone is noticed
    ranks.py            one rank decides, all ranks know; one fails, all ranks fail
    records/            what is written beside the model files, and read back: state, manifest, ledger, ...
    flags.py            flags that are made of settings
    replay.py           a process that trains steps of another run again: loads from there, and saves nothing
    system.py           time, process, mounts, how a run is laid out; dead locks of builds

Only generators.py and metrics/losses.py import torch, and no file of a checkpoint is unpickled here. Importing this
package imports neither torch nor DeepSpeed nor Megatron.
"""
