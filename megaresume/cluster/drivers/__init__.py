"""What the launch scripts of ``launch/`` call: a training is started, told to stop in time, and brought back, or not.

    node_check.py      what a node finds out about itself before the training
    driver.py          what all drivers have in common: settings, the training command
    attempts.py        what one attempt leaves for the next
    decide.py          what follows it: finish, requeue, chain or refuse; pure, tested by a table of cases
    slurm_commands.py  Slurm's commands, asked and understood
    slurm_job.py       this job, through Slurm's commands; the settings of its script, the command on every node
    slurm.py           the driver of a Slurm job
    local.py           the driver without a scheduler

Neither torch nor DeepSpeed is imported: the training is another program, perhaps in a container.
"""
