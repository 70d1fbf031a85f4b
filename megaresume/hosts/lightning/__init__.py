"""Lightning's Trainer as a host: `megaresume.attach`.

attach.py   the function, and what of a Trainer's settings would be other data
hooks.py    the Trainer's own methods and loops, hooked on the instance
host.py     `LightningHost`: checkpoints and steps; `Batches`: what the Trainer reads from; `Witness`: what it trained

Importing this package imports neither lightning nor pytorch_lightning.
"""
