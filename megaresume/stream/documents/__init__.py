"""Which piece of which document of a source comes at a position: O(1) in the position, for any epoch.

    order.py            position -> piece of a document, over epochs
    grouped.py          an epoch with what is of like lengths together
    permutation.py      position <-> item of an epoch, in one level or two
    pieces.py           an epoch as pieces of at most a sample

Who plans nothing imports no compiler: ``pieces.py`` alone.
"""
