"""From sources and weights to samples: the loop that blends and packs, what feeds it, and what its result means.

    checks.py           what is refused before anything is planned
    blocks.py           the samples planned last; any other is planned again
    planner.py          drives the loop
    feed.py             the next pieces of one source, with their lengths, without documents that a run leaves out
    kernel.py           blend and packer: one compiled loop
    arrays.py           what it works on: how it begins, stage by stage
    tournament.py       which of many sources is next; knapsack.py: what fills a bin best
    stages.py           stages that were, and those that are declared to come
    plan.py             what a run of samples holds: segments

Arrays of numbers only: no tokens are read.
"""
