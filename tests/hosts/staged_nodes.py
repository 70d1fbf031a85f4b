"""One of two ranks with a disk of its own, under DeepSpeed's ZeRO, whose copies go to a store.

``python staged_nodes.py RANK PORT DATA LOCAL URL STEPS [KILL]``: prints the samples and the loss of each step.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings

warnings.simplefilter("ignore")
rank, port = sys.argv[1:3]
os.environ |= {"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402
import torch  # noqa: E402

import megaresume  # noqa: E402

deepspeed.utils.logger.setLevel("ERROR")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.set_num_threads(1)

data_config, local, url, steps = *sys.argv[3:6], int(sys.argv[6])
deepspeed.init_distributed("gloo", verbose=False)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.Linear(8, 1))
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
data = megaresume.attach(
    engine,
    data_config,
    data_options=megaresume.DataOptions(seq_length=8, seed=1),
    checkpoints=megaresume.Checkpoints(save_dir=local, stage_to=url, keep_last=2),
    loader_options=megaresume.LoaderOptions(prefetch=0),
)
engine.load_checkpoint(local)
for batch in data:
    loss = engine(batch["tokens"]).square().sum()
    engine.backward(loss)
    engine.step()
    print("SAMPLES", engine.global_steps, batch["tokens"].tolist(), loss.item().hex(), flush=True)
    if engine.global_steps % 2 == 0:
        engine.save_checkpoint(local)
    if engine.global_steps == steps:
        break
if "KILL" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
data.close()
torch.distributed.barrier()
torch.distributed.destroy_process_group()
