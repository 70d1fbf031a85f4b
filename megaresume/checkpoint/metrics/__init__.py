"""Live figures: what is trained, by source and by document, where the time goes, and the sinks that get them.

    clocks.py    `Clocks`: seconds that a process waits for data and in saves, always counted
    figures.py   the table of figures, names and units; `Reading`: all of them at one sample
    sources.py   figures by source, from (config, sample number) alone
    losses.py    losses by segment on the device, by source and by document in a thread
    record.py    the files of a run's directory in which its processes record this
    segments.py  the losses of segments in them
    steps.py     the loss and the gradient norm of each step
    sinks.py     `SINKS`: TensorBoard, OpenTelemetry, Prometheus, Weights & Biases, MLflow, JSON lines
    words.py     what ``metrics=`` and ``--megaresume-metrics`` accept
    meter.py     `Meter`: what the training tells, and the thread that it does not wait for
    looker.py    `Looker`: that thread counts, writes the record and feeds the sinks
    session_figures.py  the figures of a session, and those of its run's ledger
    goodput.py   what became of the time of a run

Nothing is added to a batch, no collective to a step, and the training is looked at, not stopped: the thread reads
how many samples are trained, and plans those again. See docs/metrics.md.

Four records say where a run is, each for another reader:

    Mark       rank 0 at an event: a start, a save, an end. A line of run.jsonl, kept for the whole run: goodput, and
               the counts by source, with which the next start continues, come from it
    pulse      a Mark of this second, in pulse.json, overwritten in place. After a kill it is the last sign of life: the
               next start appends it to run.jsonl as the mark ``last``; `megaresume top` reads it meanwhile
    Reading    all figures at one sample, every 10 s. Every sink gets it; a line of figures.jsonl
    rank line  the steps and losses of one process since its previous line, and its waits, in rank_00003.jsonl. Rank 0
               reads those of all processes for its Reading; ``trace --by-loss`` reads the losses, and
               `megaresume replay` compares the steps
"""
