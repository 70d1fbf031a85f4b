"""Train in plain torch, or resume where it was killed.

python train.py, or on several ranks: torchrun --nproc-per-node 2 train.py
"""

import os

import torch
import torch.distributed as dist

import megaresume

if "RANK" in os.environ:  # torchrun
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1)

x = torch.randn(640, 8, generator=torch.Generator().manual_seed(2))
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))  # your dataset: len(dataset) and dataset[i]
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)).to(device)
model = torch.nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

loader = megaresume.DataLoader(dataset, batch_size=8, num_workers=2, max_epochs=2)
where = megaresume.Checkpoints(save_dir="checkpoints", keep_last=3)
loop = megaresume.attach({"model": model, "optimizer": optimizer}, loader, checkpoints=where)
loop.load()  # the newest complete checkpoint, if there is one
for _ in range(loader.epoch, 2):
    for inputs, targets in loop:
        loss = torch.nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.stepped()
        print(f"step {loop.step} loss {loss.item():.9g}", flush=True)
        if loop.step % 20 == 0:
            loop.save()
loop.save()
loop.finish()
