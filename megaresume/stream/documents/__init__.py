"""Which piece of which document of a source comes at a position: O(1) in the position, for any epoch.

    order.py            position -> piece of a document, over epochs
    permutation.py      position <-> document; block_shuffle.py: in one level or two; mixing.py: the hash
    pieces.py           an epoch as pieces of at most a sample; piece_search.py finds the piece at a place

Who plans nothing imports no compiler.
"""
