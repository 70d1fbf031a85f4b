"""From sources and weights to samples: the loop that blends and packs, what feeds it, and what its result means.

    planner.py          drives the loop
    feed.py             the next pieces of one source, with their lengths
    kernel.py           blend and packer: one compiled loop
    bins.py             what it packs into; knapsack.py: what fills a bin best
    tournament.py       which of many sources is next; prefetch.py: what the loop needs soon
    stages.py           stages that were, and those that are declared to come
    masking.py          documents that a run leaves out; remaining.py: what is left of a source
    whole.py            documents that must never be cut; trained.py: what a blend by trained tokens needs
    plan.py             what a run of samples holds: segments
    reference.py        the same in plain Python, to hold the loop against

Arrays of numbers only: no tokens are read.
"""
