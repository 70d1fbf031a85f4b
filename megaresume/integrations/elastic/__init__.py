"""A ZeRO checkpoint at another number of data-parallel ranks: DeepSpeed's universal checkpoint, made once and sealed.

    global_step4/                     ZeRO state of 2 ranks; the run now has 3
      |  convert.py                   one process, under a lock: room? -> worker.py in a process of its own
      v
    .global_step4_universal.converting-<random>/     nobody reads it; a kill leaves it, the next conversion clears it
      |  sealed (universal.py), then renamed
      v
    global_step4_universal/           loaded by any number of ranks
      |  the next checkpoint is committed
      v
    removed (made by a job), or kept (made by `megaresume convert`)

    universal.py   what such a directory is, and whether it is whole: names, the seal, removal
    convert.py     makes one: lock, disk space, progress, atomic
    worker.py      the process that runs DeepSpeed's ds_to_universal, without a GPU
    waiting.py     rank 0 works for an hour and no rank runs into a timeout of its collectives
    load.py        what loading does: take the checkpoint as it is, its conversion, make one, or refuse with the command
    restore.py     what DeepSpeed leaves out of a universal load: buffers, frozen parameters, groups of ZeRO 3

`universal` and `convert` need neither torch nor DeepSpeed. The data needs no conversion at all.
"""
