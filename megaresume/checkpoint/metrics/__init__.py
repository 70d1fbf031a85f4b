"""Live figures: what is trained, by source and by document, how time is spent, and the sinks for figures.

    clocks.py    `Clocks`: seconds that a process waits for data and in saves, always counted
    figures.py   the table of figures, names and units; `Reading`: all of them at one sample
    sources.py   figures by source, from (config, sample number) alone
    losses.py    losses by segment on the device, by source and by document in a thread
    record.py    the files in which a run's processes record this
    segments.py  the losses of segments in these files
    steps.py     the loss and the gradient norm of each step
    sinks.py     `SINKS`: TensorBoard, OpenTelemetry, Prometheus, Weights & Biases, MLflow, JSON lines
    words.py     what ``metrics=`` and ``--megaresume-metrics`` accept
    meter.py     `Meter`: receives figures from the training, which never waits for its thread
    looker.py    `Looker`: the work of that thread: counts, writes the record and feeds the sinks
    session_figures.py  the figures of a session, and those from its run's ledger
    goodput.py   how the time of a run was spent

Nothing is added to a batch, no collective to a step, and the training is observed, not stopped: the thread reads how
many samples are trained, and plans those again. See docs/metrics.md.

Four records describe the progress of a run, each for another reader:

    Mark       by rank 0 at an event: a start, a save, an end. A line of run.jsonl, kept for the whole run. It gives
               goodput, and the counts by source from which the next start continues
    pulse      a Mark of the current second, in pulse.json, overwritten in place. After a kill it is the last sign of
               life: the next start appends it to run.jsonl as the mark ``last``; until then, `megaresume top` reads it
    Reading    all figures at one sample, every 10 s. Every sink gets it; a line of figures.jsonl
    rank line  the steps and losses of one process since its last line, and its waits, in rank_00003.jsonl. Rank 0 reads
               those of all processes for its Reading; ``trace --by-loss`` reads the losses, and `megaresume replay`
               compares the steps
"""
