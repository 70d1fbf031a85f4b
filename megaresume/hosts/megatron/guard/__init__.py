"""Record and pin the order of Megatron's own datasets.

At every start, Megatron derives the order of its samples again, from flags and files. This package records the result
in the checkpoint, and makes sure that a resume gets the same order, or says what changed.

    first start   build as Megatron does  →  hash the built indexes  →  the record, in every checkpoint
    resume        compare flags and corpora with the record (refuse by name)  →  build with the recorded sizes,
                  weights and documents  →  compare the hashes  →  append whole epochs if more samples are needed now

    record.py     what is recorded: plain JSON, a few hundred bytes per corpus; `Request`: what is asked for now; what
                  identifies index arrays, and the documents of a corpus
    compare.py    record against request: what changed, in words, and the flag that restores it
    build.py      hook on ``BlendedMegatronDatasetBuilder``; additional samples after the recorded ones
    pinned.py     makes Megatron's builder build what is recorded, and enough of it; `mismatches`: what was built,
                  against the record
    order.py      `guarded` and `GuardOrder`; which ranks look at the indexes, and how the others learn of it; datasets
                  built without that builder (Megatron-DeepSpeed): compared, not pinned
"""
