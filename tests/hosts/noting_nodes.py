"""One of two ranks with a disk of its own, in a loop with Accelerate, whose hook adds a file to every checkpoint.

``python noting_nodes.py RANK PORT DISK URL STEPS [DIFFERENT]``: prints the items and the loss of each step. The file is
the same on both nodes, except in the checkpoint of the step DIFFERENT.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

rank, port, disk, url, steps = *sys.argv[1:5], int(sys.argv[5])
different = int(sys.argv[6]) if len(sys.argv) > 6 else None
os.environ |= {"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import ProjectConfiguration  # noqa: E402

import megaresume  # noqa: E402

torch.set_num_threads(1)
torch.manual_seed(1)
naming = ProjectConfiguration(disk, automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=naming)
model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
loader = megaresume.DataLoader(torch.arange(80.0).unsqueeze(1), batch_size=2, max_epochs=1)
loop = megaresume.attach(accelerator, loader, checkpoints=megaresume.Checkpoints(stage_to=url))


def note(_models: object, _weights: object, directory: str) -> None:
    (Path(directory) / "notes.txt").write_text(f"node {rank if loop.step == different else 0}")


accelerator.register_save_state_pre_hook(note)
accelerator.load_state()
for batch in loop:
    with accelerator.accumulate(model):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    print("SAMPLES", loop.step, batch.flatten().tolist(), loss.item().hex(), flush=True)
    if loop.step % 2 == 0:
        accelerator.save_state()
    if loop.step == steps:
        break
loop.close()
accelerator.end_training()
