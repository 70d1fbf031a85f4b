"""Exact, elastic, provable data resume for Megatron-LM and DeepSpeed training."""

__version__ = "0.1.0"
