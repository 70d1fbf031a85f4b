"""What comes next: the order of samples as a pure function of a config and of document lengths.

    permutation of each source  ->  blend  ->  lengths  ->  packer  ->  samples 0, 1, 2, ...
    permutation.py, order.py        kernel.py   feed.py     kernel.py   stream.py

    what defines the order
        data_yaml.py        the data config, checked and typed by pydantic (schema.py); weights as exact integers
        yaml_text.py        YAML, with one kind of error for every fault in it
        config.py           the same without paths; renamed sources
        skips.py            the documents and ranges of samples to leave out
        left_out.py         from which sample on they are left out; and the documents that failed
        arguments.py        checks the arguments of settings given in Python
        batches.py          which samples belong to which step
        dealing.py          which of them go to which rank and micro-step, balanced if asked for
        source.py           what a source must provide; its pieces; whether it is the one in a state, and has grown
    the pieces of one source, in their order
        permutation.py      position <-> item of an epoch, in one level or two; similar lengths together
        order.py            position -> piece of a document, over epochs
    the pieces of all sources as samples
        stages.py           past stages, and declared future ones
        feed.py             the input of the loop: the next pieces of each source, and its arrays
        kernel.py           blend and packer: one compiled loop
        selection.py        picks the next of many sources, and the documents that fill a bin best
        planner.py          drives the loop; `Plan`: the contents of a range of samples
        compiled.py         compiles loops and caches the result
    random access and resume
        stream.py           `Stream`: plan, state and digest of any sample
        cursor.py           plans blocks of samples, and past ones again; turns a state into the loop's arrays
        fields.py           turns those arrays into a state
        state.py            a cursor as plain JSON, and its envelope; state_text.py: as text
        changes.py          what changed since a state, and how a changed blend resumes
        in_flight.py        prompts that are issued and come back in any order; in_flight_text.py: as text
    shared
        errors.py           errors, by who must act; showing and parsing text from other people
        arrays.py           the types of arrays
        progress.py         a bar on a terminal or in a notebook, plain lines in a log
        pictures.py         what Jupyter shows of a state and of a plan

Numbers only: no torch, no tokens, no files. Importing a name from this package imports no more than it needs.
"""
