"""Train in a loop with Accelerate, or resume where it was killed.

python train.py, or on several ranks: accelerate launch --num_processes 2 train.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

import megaresume

naming = ProjectConfiguration("checkpoints", automatic_checkpoint_naming=True, total_limit=3)
accelerator = Accelerator(project_config=naming, cpu=not torch.cuda.is_available())
torch.manual_seed(1)

x = torch.randn(640, 8, generator=torch.Generator().manual_seed(2))
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))  # your dataset: len(dataset) and dataset[i]
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

loader = megaresume.DataLoader(dataset, batch_size=8, num_workers=2, max_epochs=2)  # not prepared
loop = megaresume.attach(accelerator, loader)
accelerator.load_state()  # the newest complete checkpoint, if there is one
for _ in range(loader.epoch, 2):
    for inputs, targets in loop:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"step {loop.step} loss {loss.item():.9g}", flush=True)
        if loop.step % 20 == 0:
            accelerator.save_state()
accelerator.save_state()
loop.finish()
accelerator.end_training()
