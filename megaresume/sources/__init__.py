"""Where documents live.

    path or object  ->  open_sources  ->  IndexedSource   a Megatron .bin/.idx corpus
                                          PythonSource    any object with __len__, length(i), get(i)
                                          RangeSource     the train, valid or test part of either

All answer to `Source`; those whose tokens lie in one array also to `TokenSource`, for kernels that copy without a call
for each document.
"""

from megaresume.sources.base import Source, TokenSource
from megaresume.sources.catalog import open_sources, read_data_config, register_kind
from megaresume.sources.data_path import sources_from_data_path
from megaresume.sources.indexed import IndexedSource
from megaresume.sources.python import PythonSource, as_source
from megaresume.sources.split import RangeSource, range_of, split_part, split_ranges

__all__ = [
    "IndexedSource",
    "PythonSource",
    "RangeSource",
    "Source",
    "TokenSource",
    "as_source",
    "open_sources",
    "range_of",
    "read_data_config",
    "register_kind",
    "sources_from_data_path",
    "split_part",
    "split_ranges",
]
