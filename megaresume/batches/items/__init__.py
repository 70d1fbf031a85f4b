"""Any map-style dataset on the stream: one item is one document.

options.py    what `megaresume.DataLoader` is given, as a data config
source.py     how many items there are, what they are, and how long: a column, a function, or counted and kept
streaming.py  what to write instead of a streaming dataset of `datasets`
planned.py    planned samples -> the places of the items of each batch; where an epoch of a stream ends
reader.py     places -> items, in the training process or in its workers; packed ones -> one row, without padding
"""
