"""``megaresume smoke``: the resume test to run on one's own cluster before the real run.

    plan.py             flags -> launches and stops
    job.py              what a launcher is: starts, stops, lets come back; what was started is ended
    local.py            processes of this machine, a group of them for each node
    slurm.py            jobs of the cluster; slurm_job.py: one attempt, slurm_stops.py: the ways to stop it,
                        slurm_check.py: can the cluster run the test?
    model.py            our own small models and their data
    compare.py          what the training recorded of its steps, against the uninterrupted reference
    run.py              all of it in turn
    report.py           what was found, as a table, JSON, HTML

Neither torch nor DeepSpeed is imported here: the training is another program.
"""
