"""A training job from outside: started, stopped or killed, brought back, and compared.

launching/   what the launch scripts of ``launch/`` call; scripts.py: where they are
smoke/       `megaresume smoke`: the resume test to run on one's own cluster before the real run
demo/        `megaresume demo`: the same on this machine, with a report
training/    the small trainer of both, a program of its own
jobs.py      runs of a program on this machine: started, followed with a progress bar, killed
records.py   reads what a run recorded of its steps, and compares two runs
"""
