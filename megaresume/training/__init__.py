"""The reference pretraining program: a megatron-core GPT (with images, if the data has some) under DeepSpeed.

torchrun --nproc-per-node 2 -m megaresume.training --num-layers 2 ... --save checkpoints --load checkpoints
deepspeed --module megaresume.training ...
python -m megaresume.training ...                     (one process)

flags.py        a dataclass of flags -> argparse: dashes or underscores
arguments.py    the flags, Megatron's own names, and which combinations are refused
launch.py       process group, device, parallel groups; the end of a process
mpu.py          megatron-core's parallel groups as DeepSpeed asks for them
model.py        GPTModel; attention that never crosses a document
optimizer.py    apex's, DeepSpeed's or torch's AdamW, and why
vision.py       vision transformer and projector
multimodal.py   images before the GPTModel
schedule.py     learning rate as a function of trained samples
ds_config.py    the DeepSpeed config that the flags mean
loss.py         what is minimised and what is reported
content.py      hashes of what the model gets of a sample, pixels included
accuracy.py     the share of held-out tokens that the model finds right (held_out.py reads it)
validation.py   the same samples of the validation stream every time
logging.py      lines for people, JSON lines for programs
loop.py         the loop
stopwatch.py    seconds spent on the data
compare.py      every step of a run against another run
records.py      reads the log of samples
watch.py        follows the records of a run, with a progress bar
jobs.py         runs of a program on this machine: started, watched, killed; ports.py: where its ranks meet
length.py       where a run ends, by steps or samples
own_directory.py  a directory that demo and smoke fill, and may remove
demo/           `megaresume demo`: the main job, killed and resumed, compared
__main__.py     from flags to a trained model
"""
