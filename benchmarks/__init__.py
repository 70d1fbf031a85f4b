"""Benchmarks: what the stream and its loader cost on one core, each beside a baseline measured in the same run.

    __main__.py   python -m benchmarks [--only NAME] [--quick] [--json FILE]
    setup.py      sizes, the temporary directory, corpora shared by the benchmarks
    corpora.py    synthetic corpora in Megatron's format
    lengths.py    a billion document lengths on disk, as a source
    gpt.py        the baseline: Megatron's GPTDataset, blended and wrapped as Megatron does
    line.py       a server as from far away
    store.py      records on S3 beside other packages (a part of far)
    timing.py     interleaved repetitions, medians, ratios
    table.py      rows and how they are printed

and one file a benchmark: planning, packing, assembly, loader, items, resume, state, memory, far, prepare, cli. Each has
``rows(setup)``.
"""
