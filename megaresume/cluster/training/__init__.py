"""The small trainer of demo, smoke and tests: a megatron-core GPT (with images, if the data has them) under DeepSpeed.

torchrun --nproc-per-node 2 -m megaresume.cluster.training --num-layers 2 ... --save checkpoints --load checkpoints
deepspeed --module megaresume.cluster.training ...
python -m megaresume.cluster.training ...                     (one process)

launch.py       the flags, with Megatron's names, and which combinations are refused; process group, device, parallel
                groups; ending a process
model.py        GPTModel; attention within documents; the loss; AdamW, its learning rate, the DeepSpeed config
vision.py       vision transformer and projector, in front of the GPTModel
loop.py         the loop; validation on the same samples every time, held-out accuracy
logging.py      lines for people, JSON lines for programs; time spent on data, hashes of what the model gets
__main__.py     from flags to a trained model
"""
