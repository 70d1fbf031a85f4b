"""What comes next: the order of samples as a pure function of a config and of document lengths.

    permutation of each source  ->  blend  ->  lengths  ->  packer  ->  samples 0, 1, 2, ...
    permutation.py                  kernel.py  feed.py      kernel.py   stream.py

    what defines the order
        config.py           data.yaml without its places; schema.py: what people wrote, checked and typed by pydantic
        weights.py          blend weights as exact integers
        stages.py           stages that were, and those that are declared to come
        skips.py            what a run leaves out; masking.py, remaining.py: documents; ranges.py: samples
        batches.py          which samples belong to which step, rank and micro-step
    the order of one source
        order.py            which piece of which document comes at a position; eras.py: where its epochs begin and end
        permutation.py      position <-> document, O(1); block_shuffle.py: in one level or two; mixing.py: the hash
        pieces.py           an epoch as pieces of at most a sample; piece_search.py finds the piece at a place
        growth.py           a source that has grown; absent.py: one that is gone; aliases.py: one that was renamed
        source.py           what is asked of a source: how many documents, how long each is
    planning
        planner.py          drives the loop; anchors.py: snapshots of the past, for going back
        feed.py             the next pieces of one source, with their lengths
        kernel.py           blend and packer: one compiled loop (compiled.py); bins.py, knapsack.py: what it packs into
        reference.py        the same in plain Python, to hold the loop against
        whole.py            documents that must never be cut
        plan.py             what a run of samples holds: segments
        stream.py           `Stream`: plan, state and digest of any sample
    going on
        state.py            a cursor as plain JSON; packed.py: a large one; faults.py: documents that failed
        cursor.py           between the loop's arrays and the state
        fingerprints.py     is this state one of this config and these corpora?
        changes.py          what changed since a state; outlook.py: what a change of the blend means
    for everybody
        errors.py           errors, by who must act
        progress.py         a bar on a terminal, plain lines in a log
        json_text.py        JSON that others may have damaged

Numbers only: no torch, no tokens, no files. Importing a name from this package imports no more than it needs.
"""
