"""A run, read from its checkpoint directory, and what can be asked about it: one module and one command a question.

    directory.py    `Run`: the directory, each part read once
    mirrored.py     a run in an object store, as a directory
    history.py      the path to the present: states, topologies, batch sizes; samples to steps, ranks, micro-batches
    rank_steps.py   what every rank trained, step by step, as it wrote it down
    losses.py       the losses of a run, from any log of it, and two runs compared
    logs.py         what logs of launches say: the first error of the rank that failed first; known.yaml

    inspect.py      what is there, and would a resume find it?
    latest.py       which is the newest complete checkpoint, whoever wrote it?
    plan/           what would a launch with other flags do? how often should it save?
    trace/          which documents did these steps train on, or will they?
    verify.py       is what was recorded the stream of these corpora?
    top.py          what does it do now? what comes next?
    replay.py       is a step the same, trained again? replayed_steps.py: as it was, and is; layout.py: other ranks
    prompts.py      what became of every prompt of reinforcement learning? for trace, verify, report, top
    report.py       what became of it, on one page, by report_facts.py; report_figures.py: of its live figures
    doctor.py       what is wrong: with the directory, a launch (logs.py), the machine (machine.py)
    stream.py       what does a data config give? (before there is a run)

A question has two functions for the program, ``add_arguments`` and ``run``. What it gives is an `Answer` (answer.py):
its fields are the JSON, and it knows the exit status. What needs no corpus imports neither torch nor numpy. Nothing
here unpickles anything.
"""
