"""Checkpoints: the records beside the model files, when a save becomes valid, and what is loaded after a kill.

    save                                                     load
    ----                                                     ----
    rank 0  make_room         moves an older save aside      rank 0  put_back        restores one after a kill
            begin_save        -> marker                              choose          -> Choice
    all     model files                                      rank 0  sends its Choice to the others
    all     barrier                                          others  confirm_choice  -> the same state, or an error
    rank 0  commit_save                                      rank 0  record_start    -> ledger line
              every expected file exists, none empty?
              step_0000010.json            data state
              step_0000010.manifest.json   every file with its size: from here the checkpoint is complete
              latest, latest_checkpointed_iteration.txt
              ledger.jsonl                 one line
              marker removed
    every node, in the background: files forced to the disk, checksums computed
    rank 0  the manifest again: from here the checkpoint is durable; old ones are removed

Why it is correct:

- Each of our files is replaced atomically (`megaresume.files`) and contains a checksum of its own bytes (sealed).
- The **manifest** says that a checkpoint is complete; the pointers only say which one was meant. DeepSpeed moves its
  own ``latest`` before the other ranks are done, so a pointer proves nothing.
- The **marker** distinguishes a killed save from a directory written without us, and pointers that a kill left behind
  from pointers that were moved back on purpose.
- State, manifest and marker have the id of their save; state and ledger the id of the run: records of another save or
  run cannot be mistaken for these.
- Values are captured by `begin_save`, so that a finalizer may commit them long after training has continued.
- A choice has the reason for every checkpoint that was skipped. Records of a newer megaresume stop the resume: they
  are never treated as damage.

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
    chooser.py          what all ranks load: rank 0 decides, every rank checks that it sees the same
    starter.py          records a start in the ledger of every root, on all nodes, before the first save there
    saver.py            writes the files of a checkpoint, then commits it
    metrics/            live figures during training, and how a run spent its time
    roots.py            the directories of a process: their names, locks and copies
    starts.py           the start and the end of a run: recorded, checked, with cleaning up
    copies/             copies of the checkpoints in a second storage
    host.py             `Host` and `Data`: the interfaces of a trainer, and of its data, to a session
    file_errors.py      explains a framework's errors about files
    random_state.py     the generators of every rank, in every checkpoint; generators.py: those of a process
    save/               from marker to pointers, from complete to durable; removes old ones
    load/               what is loaded; checkpoints of other programs
    store/              requests to an object store, its single writer, its contents
    nodes.py            machines without a shared directory
    lock/               one job at a time, in a directory that all ranks see
    stopping.py         when to save and exit, and how all ranks do so at the same step
    ending.py           how a process ends after an error
    meetings.py         ranks wait for each other without a collective, and notice if one is gone
    ranks.py            one rank decides, all ranks know; one fails, all ranks fail
    records/            files beside the model files: state, manifest, ledger, ...
    flags.py            turns settings into flags
    replay.py           a process that repeats steps of another run: loads from there, and saves nothing
    system.py           time, process, mounts, layout of a run; dead build locks

Only generators.py and metrics/losses.py import torch, and no checkpoint file is unpickled here. Importing this package
imports neither torch nor DeepSpeed nor Megatron.
"""
