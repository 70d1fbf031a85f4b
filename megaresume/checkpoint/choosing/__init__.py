"""What a run resumes from: the newest checkpoint that is whole, with the reason for each that was passed over.

    candidates.py   which are there, is this one whole, and what do the pointers name?
    search.py       the rules of a choice
    choose.py       of one root or of two, and the same on all ranks

Rank 0 chooses; the others confirm what it has chosen.
"""
