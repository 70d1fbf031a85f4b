"""A run, as its checkpoint directory tells it: read once, from records alone, without any corpus.

survey.py        everything that can be said about a directory, however damaged
newest.py        the newest complete checkpoint, whoever wrote it
history.py       the path to the present: states, layouts, batch sizes
steps.py         samples to steps, ranks and micro-batches
rank_log.py      what every rank trained, step by step, as it writes it down
rank_steps.py    reads that
losses.py        the losses of a run, from any log of it, and two runs compared
report.py        what the records tell, as plain JSON; report_page.py shows it
interval.py      how often to save, from what the ledger recorded

What needs the corpora is in `megaresume.trace`. Nothing here imports torch, or unpickles anything.
"""
