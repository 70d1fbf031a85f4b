"""What comes next: the order of samples as a pure function of a config and of document lengths.

    permutation of each source  ->  blend  ->  lengths  ->  packer  ->  samples 0, 1, 2, ...
    permutation.py                  kernel.py  feed.py      kernel.py   stream.py

    schema.py        what people wrote, checked and typed by pydantic
    config.py        what defines the order (data.yaml without its paths)
    weights.py       blend weights as exact integers
    permutation.py   position of a source <-> epoch and document, O(1)
    feed.py          the next documents of one source, with their lengths
    kernel.py        blend and packer: one compiled loop
    reference.py     the same in plain Python, to hold the loop against
    planner.py       drives the loop; snapshots
    plan.py          what a run of samples holds: segments
    anchors.py       snapshots of the past, for going back
    stream.py        plan, state and digest of any sample
    state.py         a cursor as plain JSON, versioned, checksummed
    cursor.py        between the loop's arrays and the state
    fingerprints.py  is this state one of this config and these corpora?
    batches.py       which samples belong to which step, rank and micro-step
    progress.py      a bar on a terminal, plain lines in a log
    errors.py        errors, by who must act

Numbers only: no torch, no tokens, no files. Importing a name from this package imports no more than it needs.
"""
