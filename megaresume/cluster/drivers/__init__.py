"""Called by the launch scripts of ``launch/``: starts a training, stops it in time, and decides whether to restart it.

    node_check.py      a node's check of itself before the training
    driver.py          common to all drivers: settings, the training command
    attempts.py        state that one attempt leaves for the next
    decide.py          what to do next: finish, requeue, chain or refuse; pure, tested by a table of cases
    slurm_commands.py  Slurm's commands, asked and understood
    slurm_job.py       this job, through Slurm's commands; its script's settings, the command for every node
    slurm.py           the driver of a Slurm job
    local.py           the driver without a scheduler

Imports neither torch nor DeepSpeed: the training is another program, perhaps in a container.
"""
