"""The corpora of tests/corpora, and prepared shards."""

from tests.corpora.conftest import cache_directory as cache_directory
from tests.corpora.conftest import simple_corpus as simple_corpus
from tests.corpora.conftest import write_corpus as write_corpus
from tests.shards.conftest import pairs as pairs
