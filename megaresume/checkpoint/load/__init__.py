"""What is loaded.

choose.py           chooses from one root or from two, the same on all ranks
search.py           the rules of a choice
damage.py           compares files with those that were saved
foreign.py          checkpoints of other programs
foreign_layouts.py  the layout of each of these programs
"""
