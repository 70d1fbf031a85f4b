"""Runs a training job from outside: starts it, stops or kills it, resumes it, and compares the results.

launcher.py         a launch of a training, and the interface of a launcher
scenario.py         start, stop, resume on another layout, compare with an undisturbed run: for demo and smoke test
watch.py            a run's progress, from its records
smoke/              `megaresume smoke`: this on the user's cluster, with every kind of stop
demo/               `megaresume demo`: this on one machine, with a report
own_directory.py    the output directory of both
training/           the small trainer of both, a separate program
local.py            launchers on this machine: for a program, or a script per node
processes.py        programs on this machine, as process groups
records.py          the recorded steps of a run, and a comparison of two runs; pages.py: as a figure and a table
new.py              `megaresume new`: the starting points in starts/, for a user's own trainer
drivers/            called by the launch scripts of ``launch/``
"""
