"""What comes next: the order of samples as a pure function of a config and of document lengths.

    permutation of each source  ->  blend  ->  lengths  ->  packer  ->  samples 0, 1, 2, ...
    documents/                      planning/               planning/   stream.py

    what defines the order
        data_yaml.py        what people wrote, checked and typed by pydantic (schema.py); weights as exact integers
        config.py           the same without its places
        skips.py            what is not to be trained: documents, and ranges.py: samples; left_out.py: since when
        batches.py          which samples belong to which step, rank and micro-step
        dealing.py          the same, so that all ranks have as much to do
        source.py           what is asked of a source: how many documents, how long each is; aliases.py: one renamed
        eras.py             where the epochs of a source begin and end
    from there
        documents/          the pieces of one source, in their order
        planning/           the pieces of all sources as samples
        stream.py           `Stream`: plan, state and digest of any sample
        compiled.py         how the loops of both are compiled, and kept
    going on
        state.py            a cursor as plain JSON; state_text.py: as text; envelope.py: what states are carried in
        faults.py           documents that failed
        cursor.py           between the loop's arrays and the state
        fingerprints.py     is this state one of these corpora, and have they grown since?
        changes.py          what changed since a state, and what a change of the blend means
    for everybody
        errors.py           errors, by who must act
        progress.py         a bar on a terminal, plain lines in a log
        text.py             text of others: shown to people, and read as JSON that may be damaged

Numbers only: no torch, no tokens, no files. Importing a name from this package imports no more than it needs.
"""
