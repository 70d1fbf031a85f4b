"""Other people's loaders, attached to DeepSpeed and Megatron: their states become part of the checkpoint.

    data = megaresume.attach(engine, loader)                DeepSpeed
    provider = megaresume.provider(base_provider)            Megatron, --dataloader-type external

Anything with ``save_state_rank`` / ``restore_state_rank`` (Energon's `SavableDataLoader`) or ``state_dict`` /
``load_state_dict`` (torchdata's `StatefulDataLoader` and its kin) will do. The order of the samples stays the loader's;
what is ours is that the state belongs to the *trained* batches, that every data-parallel rank's state is committed with
the checkpoint or not at all, and that it is restored on every replica or refused.

    adapters.py   what a kind of loader says of itself; its batches, and the state at any of them
    states.py     the states in a checkpoint, a pickle for each rank beside it; who writes which

The state of such a run is a `DataState` of kind ``loader``: everything that `megaresume.checkpoint` promises for a
stream holds for it too, and ``megaresume inspect`` unpickles nothing.
"""
