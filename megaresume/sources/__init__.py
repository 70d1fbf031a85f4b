"""From what a data config names to opened sources.

data_config.py  data.yaml, the mapping in it, or ``--data-path``: read once
catalog.py      name -> ``{path, kind, split, ...}`` to name -> `megaresume.corpora.Source`, of one vocabulary
shards.py       ``kind: webdataset``, ``image_folder`` and ``energon``
metadataset.py  Energon's metadatasets: one source of the config becomes several
data_path.py    the classic ``--data-path``: weights and paths in one list
overlap.py      whether documents that are held out are, or were, trained on
"""

from megaresume.sources.catalog import open_sources, register_kind
from megaresume.sources.data_path import sources_from_data_path

__all__ = ["open_sources", "register_kind", "sources_from_data_path"]
