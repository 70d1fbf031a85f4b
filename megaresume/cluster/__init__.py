"""A training job from outside: started, stopped or killed, brought back, and compared.

launcher.py         what a launch of a training, and its launcher, are
scenario.py         start, stop, resume on another layout, compare with an undisturbed run: the demo and the smoke test
watch.py            how far a run is, by its records
smoke/              `megaresume smoke`: that on one's own cluster, with every kind of stop
demo/               `megaresume demo`: that on this machine, with a report
own_directory.py    the directory that either of them fills
training/           the small trainer of both, a program of its own
local.py            launchers of this machine: of a program, of a script for every node
processes.py        programs of this machine, as groups of processes
records.py          what a run recorded of its steps, and two runs compared
new.py              `megaresume new`: the programs of starts/, for a reader's own trainer
drivers/            what the launch scripts of ``launch/`` call
"""
