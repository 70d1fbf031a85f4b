"""Reads a run from its checkpoint directory and answers questions about it: one module and one command per question.

    directory.py    `Run`: the directory, each part read once
    mirrored.py     a run in an object store, as a directory
    history.py      the path to the present: states, topologies, batch sizes; samples to steps, ranks, micro-batches
    rank_steps.py   what every rank trained, step by step, from its own records
    losses.py       the losses of a run, from any log of it, and two runs compared
    logs.py         the logs of launches: the first error of the rank that failed first; known.yaml

    inspect.py      what is there, and would a resume find it?
    latest.py       which is the newest complete checkpoint, whoever wrote it?
    plan/           what would a launch with other flags do? how often should it save?
    trace/          which documents did these steps train on, or will they?
    verify.py       does the record match the stream of these corpora?
    top.py          what is it doing now? what comes next?
    replay.py       is a step the same, trained again? replayed_steps.py: both versions of it; layout.py: other ranks
    prompts.py      the fate of every reinforcement-learning prompt, for trace, verify, report, top
    report.py       the run on one page, with the facts of report_facts.py and the figures of report_figures.py
    doctor.py       what is wrong: with the directory, a launch (logs.py), the machine (machine.py)
    stream.py       what does a data config yield? (before there is a run)

Each question has two functions for the program, ``add_arguments`` and ``run``. Its result is an `Answer` (answer.py),
whose fields are the JSON, and which knows the exit status. Questions that need no corpus import neither torch nor
numpy. Nothing here unpickles anything.
"""
