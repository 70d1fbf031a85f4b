"""Checkpoints: what lies beside the model files, how a save becomes valid, and what is loaded after a kill.

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

Files:

    saving/         a save, from its marker to the disk, and what becomes of older ones
    choosing/       what a run resumes from
    start.py        the beginning and the end of a run
    step_file.py    state and marker of a step           paths.py        names and paths
    data_state.py   the state of the data, its envelope  topology.py     how a run is laid out
    formats.py      sealed JSON, the format of records   system.py       time, process, mounts, dead locks of builds
    manifest.py     every file, its size and checksum
    ledger.py       one line for every checkpoint, start and end; prompt_ledger.py: what became of every prompt
    lock.py         one job at a time; claim.py: which job
    foreign/        checkpoints of other programs
    session/        one training process and this protocol: all its ranks, whatever trains

Outside session/, nothing here imports torch or numpy, unpickles anything, or knows about ranks.
"""
