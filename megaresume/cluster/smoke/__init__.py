"""``megaresume smoke``: the resume test to run on one's own cluster before the real run.

    command.py          its flags
    plan.py             flags -> launches and stops; our own small models and their data
    slurm.py            jobs of a Slurm cluster; slurm_job.py: one attempt and the ways to stop it,
                        slurm_check.py: can the cluster run the test?
    run.py              all of it in turn
    report.py           what was found, as a table, JSON, HTML

Neither torch nor DeepSpeed is imported here: the training is another program.
"""
