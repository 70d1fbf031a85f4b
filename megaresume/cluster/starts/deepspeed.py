"""Train under DeepSpeed on the stream of data.yaml, or resume where it was killed.

torchrun --nproc-per-node 1 train.py, or: deepspeed train.py
Without a GPU, DeepSpeed compiles a part of itself at its first start, and says nothing for minutes.
"""

import deepspeed
import torch
import torch.nn.functional as F

import megaresume

VOCABULARY, STEPS = 257, 160  # 257: bytes, and the end of a document
CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}

torch.manual_seed(1)
model = torch.nn.Sequential(
    torch.nn.Embedding(VOCABULARY, 64), torch.nn.Linear(64, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, VOCABULARY)
)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
where = megaresume.Checkpoints(save_dir="checkpoints", keep_last=3)
data = megaresume.attach(engine, "data.yaml", checkpoints=where)  # before load_checkpoint
engine.load_checkpoint("checkpoints")  # starts afresh if there is none
while engine.global_steps < STEPS:
    batch = {name: tensor.to(engine.device) for name, tensor in next(data).items() if torch.is_tensor(tensor)}
    losses = F.cross_entropy(engine(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="none")
    loss = (losses * batch["loss_mask"].flatten()).sum() / losses.numel()
    engine.backward(loss)
    ends_step = engine.is_gradient_accumulation_boundary()  # ask before engine.step()
    engine.step()
    if ends_step and engine.global_rank == 0:
        print(f"step {engine.global_steps} loss {loss.item():.9g}", flush=True)
    if ends_step and engine.global_steps % 20 == 0:
        engine.save_checkpoint("checkpoints")
torch.distributed.destroy_process_group()
