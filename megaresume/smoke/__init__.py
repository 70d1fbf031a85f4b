"""``megaresume smoke``: the resume test to run on one's own cluster before the real run.

    plan.py       flags -> launches and stops
    job.py        what a launcher is: starts, stops, lets come back
    local.py      processes of this machine, a group of them for each node
    signals.py    Ctrl-C and the like: what was started is ended
    slurm.py      jobs of the cluster; slurm_job.py: one attempt, slurm_stops.py: the ways to stop it,
                  slurm_check.py and slurm_nodes.py: can the cluster run the test?, slurm_commands.py: Slurm's commands
    scripts.py    where our launch scripts are
    records.py    what the training recorded of its steps: the reference program's file, or Megatron's directory
    compare.py    the run against the uninterrupted reference, step by step
    model.py      our own small models and their data
    result.py     what was found
    run.py        all of it in turn
    report.py     table, JSON, HTML

Neither torch nor DeepSpeed is imported here: the training is another program.
"""
