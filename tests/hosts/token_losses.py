"""DeepSpeed's engine with a language model of transformers, whose losses are taken without a call. Run by the tests.

    token_losses.py DATA DIRECTORY CASE STEPS

Each rank writes down the loss of every document that it trains, computed alone: by a copy of the model, of the tokens
of the document and nothing beside them.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
torch.set_num_threads(1)

import deepspeed  # noqa: E402
import transformers  # noqa: E402

import megaresume  # noqa: E402
from megaresume.batches.models import for_hf  # noqa: E402

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.utils.logger.setLevel("ERROR")


def model_of() -> Any:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=65, num_key_value_heads=2, **sizes))


def alone(model: Any, tokens: list[int]) -> list[float]:
    """The losses of a document's tokens but the first."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0].double()
    return (-logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])).flatten().tolist()


def main(data: Path, directory: Path, case: str, steps: int) -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    model = model_of()
    own = copy.deepcopy(model).double().eval()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 0.0, "torch_adam": True}},
        "zero_optimization": {"stage": 1 if case == "zero" else 0, "reduce_bucket_size": 100_000},
        "steps_per_print": 1 << 40,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    checkpoints = megaresume.Checkpoints(save_dir=directory / "run")
    attached = megaresume.attach(engine, str(data), checkpoints=checkpoints, metrics="jsonl losses every=0.05")
    record = (directory / f"alone.{dist.get_rank()}").open("w")
    for batch in attached:
        inputs = for_hf(batch, family="causal_lm")
        if case == "evaluates":
            engine.eval()
            engine(**inputs)
            engine.train()
            with torch.no_grad():
                engine(**inputs)
        flipped = inputs | {"input_ids": inputs["input_ids"].flip(1)}
        if case == "other tokens":  # before and after its own
            engine(**flipped)
        if case == "no labels":
            logits = engine(**{k: v for k, v in inputs.items() if "labels" not in k}).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["shift_labels"].flatten())
        else:
            loss = engine(**inputs).loss
        if case == "other tokens":
            engine(**flipped)
        if case == "weighted":
            loss = 2 * loss
        for row, edges in zip(batch["tokens"].tolist(), batch["cu_seqlens"], strict=True):
            for begin, end in zip(edges.tolist()[:-1], edges.tolist()[1:], strict=True):
                record.write(json.dumps([row[begin:end], alone(own, row[begin:end])]) + "\n")
        engine.backward(loss)
        is_last = engine.is_gradient_accumulation_boundary()
        engine.step()
        if is_last and engine.global_steps == steps:
            engine.save_checkpoint(str(directory / "run"))
            break
    record.close()
    attached.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
