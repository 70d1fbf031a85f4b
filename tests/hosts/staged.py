"""One rank that trains, saves to local storage and copies: ``python staged.py DATA LOCAL SHARED STEPS [KILL]``."""

from __future__ import annotations

import os
import signal
import sys
import warnings

warnings.simplefilter("ignore")
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402
import torch  # noqa: E402

import megaresume  # noqa: E402

deepspeed.utils.logger.setLevel("ERROR")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.set_num_threads(1)

data_config, local, shared, steps = *sys.argv[1:4], int(sys.argv[4])
alias = f"{local}.alias"  # the same directory by another name
if not os.path.islink(alias):
    os.symlink(os.path.basename(local), alias)
deepspeed.init_distributed("gloo", verbose=False)
torch.manual_seed(1)
model = torch.nn.Embedding(100, 8)
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}
engine, *_ = deepspeed.initialize(model=model, config=config)
data = megaresume.attach(
    engine,
    data_config,
    data_options=megaresume.DataOptions(seq_length=8, seed=1),
    checkpoints=megaresume.Checkpoints(save_dir=local, stage_to=shared, keep_last=2),
    loader_options=megaresume.LoaderOptions(prefetch=0),
)
engine.load_checkpoint(local)
for batch in data:
    engine.backward(engine(batch["tokens"]).sum())
    engine.step()
    print("SAMPLES", engine.global_steps, batch["tokens"].tolist(), flush=True)
    if engine.global_steps % 2 == 0:
        engine.save_checkpoint(alias)
    if engine.global_steps == steps:
        break
if "KILL" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
data.close()
torch.distributed.destroy_process_group()
