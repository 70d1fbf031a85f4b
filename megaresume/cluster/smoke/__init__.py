"""``megaresume smoke``: a resume test to run on one's own cluster before the real run.

    command.py          its flags; the test from start to end
    plan.py             turns flags into launches and stops; our own small models and their data
    slurm.py            jobs of a Slurm cluster; checks whether it can run the test
    slurm_job.py        one attempt of a job, and the ways to stop it
    report.py           the results as a table, JSON, HTML
    interrupted.py      ends what was started on Ctrl-C and the like

Neither torch nor DeepSpeed is imported here: the training is another program.
"""
