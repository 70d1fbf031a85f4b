"""Image-text records in tar shards, as webdataset and Energon have them; or in JSON lines and a folder of images.

shards -- megaresume prepare --> NAME.shards.idx -- data.yaml --> ShardSource -- one range read --> record

prepare.py      tar shards to an index; index_measure.py: one shard to a part, index_merge.py: parts to the index
join.py         the indexes of several machines to one
index.py        the bytes of an index, and opening one
source.py       `ShardSource`: records as documents
tar.py          members to records, and the damage that archives can have
folder.py       rows of JSON lines, with the images that they name, to records
ahead.py        what comes next is read before it is needed
files.py        range reads: local descriptors, object stores (remote.py)
disk.py         records of object stores on a local disk, for the next epoch
unpacked.py     compressed files, decompressed once on each machine
paths.py        braces, wildcards, URLs to a list of shards
energon.py      ``.nv-meta`` of an Energon data set, and its field map
"""

from megaresume.shards.index import ShardIndex
from megaresume.shards.source import ShardSource

__all__ = ["ShardIndex", "ShardSource"]
