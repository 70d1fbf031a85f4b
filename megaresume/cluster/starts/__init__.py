"""Starting points: complete programs of at most forty lines, which ``megaresume new`` copies for a user to change.

    torch.py, trainer.py, accelerate.py, lightning.py   each generates a tiny dataset
    deepspeed.py                                        reads the stream of a data.yaml
    vlm.py                                              the same, with pictures in tar shards
    megatron.sh                                         the same, for Megatron-LM's own script

They run unchanged on any number of ranks, and resume exactly after a kill. Nothing imports them.
"""
