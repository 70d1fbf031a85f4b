"""Record and pin the order of Megatron's own datasets.

Megatron derives the order of its samples again at every start, from flags and files. This package records what came
out, in the checkpoint, and sees to it that a resume gets the same again, or is told what changed.

    first start   build as Megatron does  →  hash the built indexes  →  the record, in every checkpoint
    resume        compare flags and corpora with the record (refuse by name)  →  build with the recorded sizes,
                  weights and documents  →  compare the hashes  →  append whole epochs where more is needed now

    record.py     what is recorded: plain JSON, a few hundred bytes per corpus; `Request`: what is asked for now; what
                  identifies index arrays, and the documents of a corpus
    compare.py    record against request: what changed, in words, and the flag that restores it
    build.py      around ``BlendedMegatronDatasetBuilder``; further samples after the recorded ones
    pinned.py     let Megatron's builder build what is recorded, and as much as is needed; `mismatches`: what was built,
                  against the record
    order.py      `guarded` and `GuardOrder`; who looks at the indexes, and how the others hear of it; datasets built
                  without that builder (Megatron-DeepSpeed): compared, not pinned
"""
