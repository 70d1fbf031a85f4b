"""Figures in the loggers that a trainer has already, and losses of items, under real trainers."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import megaresume
from megaresume import Checkpoints
from megaresume.stream.errors import UsageError
from tests.checkpoint.metrics.runs import config_of, write_sources
from tests.hosts.torch.program import without_shared_memory

pytestmark = pytest.mark.process  # their packages ask the system what it is

METRICS = ["trainer", "every=0.01"]
DOCUMENTS = "megaresume/source/documents/"


class Items(torch.utils.data.Dataset[Any]):
    """Item i is i, ``length`` times; of a bad one the target is far away."""

    def __init__(self, items: int = 64, bad: tuple[int, ...] = ()) -> None:
        self.items, self.bad = items, bad

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((3,), float(i)), "y": torch.full((3,), 90.0 if i in self.bad else 1.0)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        losses = (self.weight * x - y) ** 2
        return {"loss": losses.mean(), "losses": losses}


def wait_for_reading(meter: Any) -> None:
    """These trainings may be over before the meter's thread has run once."""
    while meter.latest is None:
        time.sleep(0.001)


def test_hugging_face(tmp_path: Path) -> None:
    import transformers

    class Trainer(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            found = model(**inputs)
            loader.meter.losses(inputs, found["losses"])
            if self.state.global_step == 8:
                wait_for_reading(loader.meter)
            return (found["loss"], found) if return_outputs else found["loss"]

    args = transformers.TrainingArguments(
        str(tmp_path / "run"),
        max_steps=16,
        per_device_train_batch_size=4,
        logging_steps=1,
        learning_rate=0.0,
        report_to=[],
        use_cpu=True,
    )
    bad = (3, 17, 40)
    trainer = Trainer(Model(), args, train_dataset=Items(bad=bad))
    loader = megaresume.attach(trainer, metrics=["trainer", "every=0.01"])
    trainer.train()
    logged = [line for line in trainer.state.log_history if f"{DOCUMENTS}data" in line]
    assert logged
    for line in logged:  # the figures of a reading say of which step they are
        assert line[f"{DOCUMENTS}data"] == 4 * line["megaresume/step"] <= 4 * line["step"]
    meter = tmp_path / "run/megaresume/meter"
    lines = [json.loads(line) for line in (meter / "rank_00000.jsonl").open()]
    assert sum(tokens for line in lines for _, tokens in line.get("by_source", {}).values()) == 64 * 3
    from tests.cli.conftest import megaresume as command

    done = command("trace", tmp_path / "run", "--samples", "0:64", "--by-loss", "--most", "4", "--json")
    documents = json.loads(done.stdout)["documents"]
    assert sorted(one["document"] for one in documents[:3]) == [*bad]
    assert documents[3]["loss"] < documents[2]["loss"] == 90.0**2


class Texts(torch.utils.data.Dataset[Any]):
    """Item i is 3 to 12 tokens, and the first is not a target."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        tokens = torch.randint(1, 60, (3 + i % 10,), generator=torch.Generator().manual_seed(i)).tolist()
        return {"input_ids": tokens, "labels": [-100, *tokens[1:]]}


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_losses_of_hugging_face(tmp_path: Path, packed: bool) -> None:
    """Without a call of the user's; in steps of two micro-batches, which the Trainer reads before it trains them."""
    import transformers

    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))
    args = transformers.TrainingArguments(
        str(tmp_path / "run"),
        max_steps=4,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        learning_rate=0.0,
        report_to=[],
        use_cpu=True,
    )

    def collate(items: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(item["labels"]) for item in items)
        fill = {"input_ids": 0, "labels": -100}
        return {k: torch.tensor([i[k] + [v] * (longest - len(i[k])) for i in items]) for k, v in fill.items()}

    collator = transformers.DataCollatorWithFlattening() if packed else collate
    trainer = transformers.Trainer(model, args, train_dataset=Texts(), data_collator=collator)
    more: dict[str, Any] = {"seq_length": 16, "packing": "best_fit"} if packed else {}
    megaresume.attach(trainer, metrics="losses every=0.05", **more)
    trainer.train()
    from tests.cli.conftest import megaresume as command

    done = command("trace", tmp_path / "run", "--samples", "0:24", "--by-loss", "--most", "100", "--json")
    documents = json.loads(done.stdout)["documents"]
    assert len(documents) >= 24
    for one in documents:
        tokens = torch.tensor([Texts()[one["document"]]["input_ids"]])
        with torch.no_grad():
            logits = model.eval()(input_ids=tokens).logits[0].double()
        expected = -logits.log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None]).squeeze(1)
        assert one["tokens"] == len(expected)
        assert abs(one["loss"] - float(expected.mean())) < 1e-5


def test_lightning(tmp_path: Path) -> None:
    import lightning
    from lightning.pytorch.loggers import CSVLogger

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.model(**batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=CSVLogger(str(tmp_path / "logs")), enable_progress_bar=False
    )
    megaresume.attach(trainer, checkpoints=Checkpoints(save_dir=tmp_path / "run"), metrics=METRICS)
    trainer.fit(Module(), megaresume.DataLoader(Items(400), batch_size=4), ckpt_path="last")
    [path] = (tmp_path / "logs").rglob("metrics.csv")
    rows = [row for row in csv.DictReader(path.open()) if row.get(f"{DOCUMENTS}data")]
    assert rows
    for row in rows:
        assert float(row[f"{DOCUMENTS}data"]) == 4 * int(row["step"])


def test_accelerate(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    logged: list[tuple[int, dict[str, float]]] = []

    class Tracker(GeneralTracker):
        name, requires_logging_directory = "mine", False
        tracker = None

        def log(self, values: dict[str, float], step: int | None = None, **more: Any) -> None:
            logged.append((step or 0, values))

    accelerator = Accelerator(cpu=True, log_with=Tracker())
    accelerator.init_trackers("run")
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.0))
    loader = megaresume.DataLoader(Items(400), batch_size=4)
    loop = megaresume.attach(accelerator, loader, checkpoints=Checkpoints(save_dir=tmp_path / "run"), metrics=METRICS)
    for step, batch in enumerate(loop):
        if step == 50:
            wait_for_reading(loop.meter)
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    loop.finish()
    assert logged
    for step, values in logged:
        assert values[f"{DOCUMENTS}data"] == 4 * step


def test_a_loop_has_no_loggers(tmp_path: Path) -> None:
    model = Model()
    objects = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    with pytest.raises(UsageError, match="this trainer has no loggers"):
        megaresume.attach(
            objects,
            megaresume.DataLoader(Items(), batch_size=4),
            checkpoints=Checkpoints(save_dir=tmp_path / "run"),
            metrics="trainer",
        )


def test_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    documents = write_sources(tmp_path)
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    without_shared_memory()
    model = torch.nn.Embedding(2000, 4)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_allow_untested_optimizer": True,
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path / "logs"), "job_name": "run"},
    }
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    checkpoints = Checkpoints(save_dir=tmp_path / "run")
    data = megaresume.attach(engine, config_of(tmp_path), checkpoints=checkpoints, metrics=[*METRICS, "jsonl"])
    tokens = dict.fromkeys(documents, 0)
    for batch in data:
        if engine.global_steps == 100:
            break
        for k, name in enumerate(documents):
            tokens[name] += int((batch["tokens"] // 1000 == k).sum())
        data.meter.losses(batch, batch["tokens"].float())
        engine.backward(engine(batch["tokens"]).sum())
        engine.step()
    data.close()
    lines = [json.loads(line) for line in (tmp_path / "run/megaresume/meter/figures.jsonl").open()]
    assert lines[-1]["figures"]["megaresume.step"] == 100
    assert lines[-1]["figures"]["megaresume.source.tokens"] == tokens
    assert set(lines[-1]["figures"]["megaresume.source.loss"]) == set(documents)
    [path] = (tmp_path / "logs").rglob("*source_tokens_web*.csv")
    assert len(path.read_text().splitlines()) > 2
