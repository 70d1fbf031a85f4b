"""Starting points: whole programs of at most forty lines, which ``megaresume new`` copies for a user to change.

    torch.py, trainer.py, accelerate.py, lightning.py   each makes a tiny dataset by itself
    deepspeed.py                                        reads the stream of a data.yaml
    vlm.py                                              the same, of pictures in tar shards
    megatron.sh                                         the same, for Megatron-LM's own script

They run as they are, on any number of ranks, and continue exactly after a kill. Nothing imports them.
"""
