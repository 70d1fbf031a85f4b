"""A ZeRO checkpoint at another number of data-parallel ranks: DeepSpeed's universal checkpoint, made once and sealed.

    global_step4/                     ZeRO state of 2 ranks; the run now has 3
      |  conversion.py                one process, under a lock: room? -> worker.py in a process of its own
      v
    .global_step4_universal.converting-<random>/     nobody reads it; a kill leaves it, the next conversion clears it
      |  sealed, then renamed
      v
    global_step4_universal/           loaded by any number of ranks
      |  the next checkpoint is committed
      v
    removed (made by a job), or kept (made by `megaresume convert`)

    load_rules.py   what a checkpoint must be to be loaded; `megaresume plan` asks it too
    command.py      `megaresume convert`
    conversion.py   makes one: lock, disk space, progress, the seal; and whether one is whole
    worker.py       the process that runs DeepSpeed's ds_to_universal, without a GPU
    load.py         what loading does: take the checkpoint as it is, its conversion, make one, or refuse with the
                    command; and put back what DeepSpeed leaves out of a universal load

`load_rules` and `conversion` need neither torch nor DeepSpeed. The data needs no conversion at all.
"""
