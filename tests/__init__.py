"""A package, so that those of the same name that VeRL and TransferQueue install beside it do not hide it."""
