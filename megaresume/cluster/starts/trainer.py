"""Train a small Llama with Hugging Face's Trainer, or resume where it was killed.

python train.py, or on several ranks: torchrun --nproc-per-node 2 train.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import megaresume

# Your dataset, tokenized: len(dataset) and dataset[i]. Here "3 + 4 = 7", a byte a token.
texts = [f"{a:2} + {b:2} = {a + b:2}".encode() for a in range(20) for b in range(32)]
dataset = [{"input_ids": list(text), "labels": list(text)} for text in texts]


class Steps(TrainerCallback):
    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs and state.is_world_process_zero:
            print(f"step {state.global_step} loss {logs['loss']}", flush=True)


torch.manual_seed(1)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, attention_dropout=0.1, **sizes))
args = TrainingArguments(
    output_dir="checkpoints",
    num_train_epochs=2,
    per_device_train_batch_size=8,
    dataloader_num_workers=2,
    save_steps=20,
    save_total_limit=3,
    logging_steps=1,
    report_to=[],
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),  # without it, each process would train by itself
)
trainer = Trainer(model, args, train_dataset=dataset, callbacks=[Steps()])
megaresume.attach(trainer)
trainer.train(resume_from_checkpoint=True)  # starts afresh if there is no checkpoint
