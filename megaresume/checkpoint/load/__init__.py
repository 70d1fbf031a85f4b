"""What is loaded.

choose.py           of one root or of two, the same on all ranks
search.py           the rules of a choice
damage.py           its files, compared with those that were saved
foreign.py          checkpoints of other programs
foreign_layouts.py  how each of these programs lays them out
"""
