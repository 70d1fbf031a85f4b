"""Each extra alone, in an environment of its own: what it is for works, and nothing that it lacks is imported."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import megaresume
from tests.hosts.megatron.patching.scripts import V0_18
from tests.packaging.conftest import ROOT, SAVE, make_environment
from tests.release import release

pytestmark = pytest.mark.process

LOADER = """
import megaresume
print([batch.tolist() for batch in megaresume.DataLoader(range(8), batch_size=4, max_epochs=1)])
"""
STREAM = """
import torch, megaresume
stream, schedule = megaresume.open_stream("data.yaml"), megaresume.BatchSchedule.constant(1)
batch = next(iter(megaresume.StreamLoader(stream, schedule, micro_batch_size=1)))
assert batch["tokens"].dtype == torch.int64
"""
DEEPSPEED = """
import deepspeed, os, torch, megaresume
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
model = torch.nn.Embedding(257, 4)
config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "zero_allow_untested_optimizer": True}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
data = megaresume.attach(engine, "data.yaml", checkpoints=megaresume.Checkpoints(save_dir="checkpoints"))
engine.load_checkpoint("checkpoints")
engine.backward(engine(next(data)["tokens"]).sum())
engine.step()
assert engine.save_checkpoint("checkpoints")
"""
TRAINER = """
import sys, torch, transformers, megaresume
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
    def forward(self, x):
        return {"loss": (self.weight - x.mean()) ** 2}
args = transformers.TrainingArguments("run", max_steps=2, save_steps=1, report_to=[], use_cpu=True)
trainer = transformers.Trainer(Model(), args, train_dataset=[{"x": torch.tensor(float(i))} for i in range(64)])
megaresume.attach(trainer)
trainer.train(resume_from_checkpoint=True)
"""
LIGHTNING = """
import lightning, torch, megaresume
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
    def training_step(self, x):
        return (self.weight - x.float().mean()) ** 2
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False)
megaresume.attach(trainer, checkpoints=megaresume.Checkpoints(save_dir="run"))
trainer.fit(Module(), megaresume.DataLoader(range(8), batch_size=4), ckpt_path="last")
"""
PATCH = f"""
from pathlib import Path
Path("pretrain.py").write_text({V0_18!r})
"""
TOKENIZER = """
from tokenizers import Tokenizer, models, pre_tokenizers
tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "<eos>": 2}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.save("tokenizer.json")
"""
CHAT = """
import json, pyarrow, pyarrow.parquet
from tokenizers import Tokenizer, models, pre_tokenizers
tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2, "<eos>": 3}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.add_special_tokens(["<eos>"])
tokenizer.save("tokenizer.json")
template = "{% for m in messages %}{{ m.role + ' ' + m.content + '<eos>' }}{% endfor %}"
open("tokenizer_config.json", "w").write(json.dumps({"chat_template": template}))
messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": messages}]), "chats.parquet")
"""
SHARD = """
import io, tarfile
from PIL import Image
picture = io.BytesIO()
Image.new("RGB", (32, 32), "red").save(picture, "png")
with tarfile.open("shard.tar", "w") as tar:
    for name, content in (("a.png", picture.getvalue()), ("a.txt", b"a picture")):
        member = tarfile.TarInfo(name)
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
"""
S3 = """
from megaresume.data.remote import is_url
import fsspec
assert is_url("s3://bucket/web.bin") and fsspec.get_filesystem_class("s3").__module__ == "s3fs.core"
"""
LOADERS = """
import megatron.energon, torch, megaresume
from torchdata.stateful_dataloader import StatefulDataLoader
from megaresume.hosts.loaders import adapter_of
print(adapter_of(StatefulDataLoader(range(8), batch_size=2)))
"""
METRICS = """
from megaresume.checkpoint.metrics.sinks import SINKS, check
for word in SINKS:
    check(word, "")
"""
#: extra -> programs: `megaresume ...`, or Python.
CASES = {
    "text": [TOKENIZER, "prepare text.txt --output words --tokenizer . --overwrite"],
    "chat": [CHAT, "prepare chats.parquet --output chat --tokenizer . --chat"],
    "torch": [LOADER, STREAM],
    "deepspeed": [DEEPSPEED, "inspect checkpoints", "verify checkpoints --data data.yaml"],
    "megatron": [STREAM, "run --help"],
    "hugging-face": [TRAINER, LOADER, "verify run"],
    "lightning": [LIGHTNING, LOADER, "verify run"],
    "vlm": [SHARD, "prepare shard.tar --output shards --processor patches"],
    "s3": [S3],
    "loaders": [LOADERS],
    "patch": [PATCH, "patch pretrain.py"],
    "report": [SAVE, "report save"],
    "metrics": [METRICS],
    "demo": ["demo --out run"],
    "docs": [f"-m sphinx -q --fail-on-warning {ROOT / 'docs'} site"],
}
#: those that install torch.
WITH_TORCH = {"torch", "deepspeed", "megatron", "hugging-face", "lightning", "loaders", "demo"}
#: those that are not for users of the wheel.
OF_A_CHECKOUT = {"release", "test"}


def pythons() -> dict[str, str]:
    """Version, as 3.12 -> interpreter: those that pyproject.toml names and that are here, on PATH or pyenv's."""
    found = {}
    versions = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    for version in versions:
        pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser().glob(f"versions/{version}.*/bin/python")
        this = sys.version_info[:2] == tuple(map(int, version.split(".")))
        for place in (sys.executable if this else None, shutil.which(f"python{version}"), *map(str, pyenv)):
            # pyenv has a program of every name, which fails for versions that are not chosen
            if place and subprocess.run([place, "-c", "import venv"], capture_output=True).returncode == 0:
                found[version] = place
                break
    return found


def test_every_extra_has_a_case() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(CASES) | OF_A_CHECKOUT == set(extras)


@pytest.fixture(scope="module", params=["3.11", "3.12", "3.13"])
def python(request: pytest.FixtureRequest) -> str:
    """An interpreter."""
    if request.param not in (found := pythons()):
        pytest.skip(f"no Python {request.param} here, only {', '.join(found)}")
    return found[request.param]


@release(
    "an environment, and the downloads of it, for each extra on each Python",
    "`tests/packaging/test_wheel.py::test_the_wheel`, `tests/packaging/test_wheel.py::test_without_torch`",
)
@pytest.mark.parametrize("extra", CASES)
def test_what_an_extra_is_for(
    built: tuple[Path, Path], with_torch: Callable[[str], Path], tmp_path: Path, python: str, extra: str
) -> None:
    layer = with_torch(python) if extra in WITH_TORCH else None
    run = make_environment(tmp_path, built[1], extra, python=python, layer=layer)
    for words in CASES[extra]:
        if "\n" in words:
            status, text = run("-c", words, program="python")
        else:
            status, text = run(*words.split(), program="python" if words.startswith("-m ") else "megaresume")
        assert status == 0 and "Traceback" not in text, text
    shutil.rmtree(tmp_path, ignore_errors=True)


@release(
    "downloads the base dependencies",
    "`tests/packaging/test_wheel.py::test_the_archive_holds_what_a_developer_needs`, "
    "`tests/packaging/test_wheel.py::test_the_wheel`",
)
def test_the_archive_is_installed_like_the_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    run = make_environment(tmp_path, built[0])
    status, text = run(
        "-c", "import importlib.metadata as m, megaresume; print(m.version('megaresume'))", program="python"
    )
    assert (status, text.strip()) == (0, megaresume.__version__)
    assert run("-c", SAVE, program="python") == (0, "")
    status, text = run("verify", "save", "--data", "data.yaml")
    assert status == 0 and "proved" in text, text
