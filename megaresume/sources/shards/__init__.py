"""Image-text records in tar shards, as webdataset and Energon have them.

shards -- megaresume prepare --> NAME.shards.idx -- data.yaml --> ShardSource -- one range read --> record

tar.py          members to records, and the damage that archives can have
files.py        range reads: local descriptors, object stores (remote.py)
paths.py        braces, wildcards, URLs to a list of shards
layout.py       the bytes of an index; index.py opens one
source.py       `ShardSource`: records as documents
open.py         ``kind: webdataset`` and ``kind: energon`` in a data.yaml
energon.py      ``.nv-meta`` of an Energon data set, with its field map (fields.py) and blends (metadataset.py)
"""

from megaresume.sources.shards.index import ShardIndex
from megaresume.sources.shards.source import ShardSource

__all__ = ["ShardIndex", "ShardSource"]
