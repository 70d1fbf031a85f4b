"""The reference pretraining program: a megatron-core GPT (with images, if the data has some) under DeepSpeed.

torchrun --nproc-per-node 2 -m megaresume.training --num-layers 2 ... --save checkpoints --load checkpoints
deepspeed --module megaresume.training ...
python -m megaresume.training ...                     (one process)

arguments.py    the flags, Megatron's own names, and which combinations are refused; where a run ends
launch.py       process group, device, parallel groups; the end of a process
model.py        GPTModel; attention that never crosses a document; the loss; megatron-core's parallel groups
optimizer.py    AdamW, the learning rate as a function of trained samples, the DeepSpeed config that the flags mean
multimodal.py   vision transformer and projector, images before the GPTModel
loop.py         the loop
validation.py   the same samples of the validation stream every time; held-out accuracy
logging.py      lines for people, JSON lines for programs; seconds spent on the data, hashes of what the model gets
records.py      reads those lines, and compares two runs step by step
jobs.py         runs of a program on this machine: started, followed with a progress bar, killed
demo/           `megaresume demo`: the main job, killed and resumed, compared
__main__.py     from flags to a trained model
"""
