"""Documents of text: where they lie, how long they are, what they hold.

base.py            `Source`: what loading asks of any source; records, encoded documents, images
index.py           `IndexedDocuments`: documents whose lengths stand in an .idx
indexed.py         `IndexedSource`: a Megatron .bin/.idx corpus
layout.py          the bytes of .bin/.idx, for its reader and its writer; kernels.py reads its arrays
spans.py           ``<prefix>.spans``: which tokens of a corpus are trained
places.py          ``<prefix>.places``: where documents lie in raw files, of a corpus without a .bin
python.py          any object with __len__, length(i), get(i) as a source; items of a dataset by number alone
split.py           `RangeSource`: the train, valid or test part of a source, as ``--split`` cuts it
scan.py            the fingerprint of any source, and what it sees of the tokens
files.py           whether files are those that were opened; files mapped, and written without a half one
sidecar.py         ``<prefix>.megaresume.json`` and .pieces: what need not be computed twice
yaml_text.py       YAML that people wrote, with one kind of error for whatever is wrong with it
prepare/           text, JSON lines or directories to a .bin/.idx corpus
"""
