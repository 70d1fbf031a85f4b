"""``megaresume smoke``: the resume test to run on one's own cluster before the real run.

    command.py          its flags; the test from beginning to end
    plan.py             flags -> launches and stops; our own small models and their data
    slurm.py            jobs of a Slurm cluster, and can the cluster run the test?
    slurm_job.py        one attempt of a job, and the ways to stop it
    report.py           what was found, as a table, JSON, HTML
    interrupted.py      Ctrl-C and the like: what was started is ended first

Neither torch nor DeepSpeed is imported here: the training is another program.
"""
