"""Live figures: what is trained, by source and by document, where the time goes, and who is told.

    clocks.py    `Clocks`: seconds that a process waits for data and in saves, always counted
    figures.py   the table of figures, names and units; `Reading`: all of them at one sample
    sources.py   figures by source, from (config, sample number) alone
    losses.py    losses by segment on the device, by source and by document in a thread
    record.py    what the processes of a run write down about it, in its directory
    segments.py  the losses of segments in it
    words.py     what ``metrics=`` and ``--megaresume-metrics`` say
    sinks.py     who is told: TensorBoard, OpenTelemetry, Prometheus, Weights & Biases, MLflow, JSON lines
    meter.py     `Meter`: one thread of a process, which looks, and tells

Nothing rides in a batch, no collective is added to a step, and the training is looked at, not stopped: the thread reads
how many samples are trained, and plans those again. See docs/metrics.md.
"""
