"""Train with Lightning, or resume where it was killed.

python train.py, or on several ranks: torchrun --nproc-per-node 2 train.py
"""

import os

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import megaresume


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        self.loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        return self.loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        print(f"step {self.trainer.global_step} loss {self.loss.item():.9g}", flush=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


L.seed_everything(1, verbose=False)
x = torch.randn(640, 8, generator=torch.Generator().manual_seed(2))
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))  # your dataset: len(dataset) and dataset[i]
saver = ModelCheckpoint("checkpoints/best", every_n_train_steps=20)
devices = int(os.environ.get("WORLD_SIZE", 1))
trainer = L.Trainer(max_epochs=2, callbacks=[saver], devices=devices, enable_progress_bar=False, logger=False)
megaresume.attach(trainer, checkpoints=megaresume.Checkpoints(save_dir="checkpoints/run", keep_last=3))
ranks = {"dp_rank": trainer.global_rank, "dp_size": trainer.world_size}
loader = megaresume.DataLoader(dataset, batch_size=8, num_workers=2, **ranks)
trainer.fit(Model(), loader, ckpt_path="last")  # starts afresh if there is no checkpoint
