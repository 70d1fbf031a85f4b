"""What the launch scripts of ``launch/`` call: a training is started, told to stop in time, and brought back, or not.

    decide.py          what follows an attempt: finish, requeue, chain or refuse; pure, tested by a table of cases
    attempts.py        what one attempt leaves for the next; what it has written to the ledger of its checkpoints
    node_check.py      what a node finds out about itself before the training
    driver.py          what all drivers have in common
    slurm_commands.py  Slurm's commands, asked and understood
    slurm_job.py       this job, through Slurm's commands
    slurm_settings.py  the settings of the batch script, what is refused, and the command on every node
    slurm.py           the driver of a Slurm job
    local.py           the driver without a scheduler

Neither torch nor DeepSpeed is imported: the training is another program, perhaps in a container.
"""
