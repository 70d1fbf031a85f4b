"""Which rank and micro-step gets which samples of a global batch, so that no rank waits long for another.

    balance.py          `Balance`: what is to cost the same, and what a sample costs
    deal.py             `deal`: the samples of one rank, with and without it
    even.py             numbers in groups of equal size, with sums as equal as may be: compiled loops

The samples of a global batch are the same ones in any case.
"""
