"""A run, as its checkpoint directory tells it, from records alone: no corpus is opened.

run.py            `Run`: the directory, each part read once
history.py        the path to the present: states, topologies, batch sizes
steps.py          samples to steps, ranks and micro-batches
newest.py         the newest complete checkpoint, whoever wrote it
rank_steps.py     what every rank trained, step by step, as it wrote it down
losses.py         the losses of a run, from any log of it, and two runs compared
report.py         what the records tell, as plain JSON
report_page.py    that as a page
interval.py       how often to save, from what the ledger recorded

What needs the corpora is in `megaresume.trace`. Nothing here imports torch, or unpickles anything.
"""
