"""What comes next: the order of samples as a pure function of a config and of document lengths.

    permutation of each source  ->  blend  ->  lengths  ->  packer  ->  samples 0, 1, 2, ...
    permutation.py, order.py        kernel.py   feed.py     kernel.py   stream.py

    what defines the order
        data_yaml.py        what people wrote, checked and typed by pydantic (schema.py); weights as exact integers
        yaml_text.py        YAML, with one kind of error for whatever is wrong with it
        config.py           the same without its places; sources that were renamed
        skips.py            what is not to be trained: documents, ranges of samples
        left_out.py         since when; and the documents that failed
        arguments.py        what settings in Python are made with
        batches.py          which samples belong to which step
        dealing.py          which of them to which rank and micro-step, also so that all ranks have as much to do
        source.py           what is asked of a source; its pieces; is it one of a state, and has it grown since?
    the pieces of one source, in their order
        permutation.py      position <-> item of an epoch, in one level or two; similar lengths together
        order.py            position -> piece of a document, over epochs
    the pieces of all sources as samples
        stages.py           stages that were, and those that are declared to come
        feed.py             what the loop works on: the next pieces of each source, and its arrays
        kernel.py           blend and packer: one compiled loop
        selection.py        which of many sources is next, and what fills a bin best
        planner.py          drives the loop; `Plan`: what a run of samples holds
        compiled.py         how loops are compiled, and kept
    any sample, and going on
        stream.py           `Stream`: plan, state and digest of any sample
        cursor.py           the samples planned last, any other planned again; from a state to the loop's arrays
        fields.py           and from these to the state
        state.py            a cursor as plain JSON, and what it is carried in; state_text.py: as text
        changes.py          what changed since a state, and what a change of the blend means
        in_flight.py        samples that are trained in another order: prompts, out and back; in_flight_text.py: as text
    for everybody
        errors.py           errors, by who must act; text of others, shown to people and read as JSON
        arrays.py           the types of arrays
        progress.py         a bar on a terminal or in a notebook, plain lines in a log
        pictures.py         what Jupyter shows of a state and of a plan

Numbers only: no torch, no tokens, no files. Importing a name from this package imports no more than it needs.
"""
