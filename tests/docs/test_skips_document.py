"""docs/changing-data.md: the configs of what is left out and numbers, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import yaml

from megaresume.data.data_config import with_skip_files
from megaresume.hosts.megatron.arguments import parse_steps
from megaresume.stream.config import StreamConfig
from megaresume.stream.skips import MOST_WRITTEN
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList
from tests.docs.pages import section

TEXT = section("changing-data.md", "Leave data out")


def test_the_configs(tmp_path: Path) -> None:
    samples, documents = re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)
    np.save(tmp_path / "broken.npy", np.array([3, 5]))
    data = {"seq_length": 64, "packing": "best_fit", "sources": {"web": {"weight": 2}, "pairs": {}}}
    lengths = [LengthList([20 + (7 * i + k) % 90 for i in range(150)]) for k in range(2)]
    whole = Stream(StreamConfig.from_dict(data), lengths)
    stream = Stream(StreamConfig.from_dict(data | yaml.safe_load(samples)), lengths)
    assert stream.state_at(81).reached == 89
    assert (stream.plan(80, 81).table == whole.plan(88, 89).table).all()
    skipped = with_skip_files(data | yaml.safe_load(documents), tmp_path)
    table = Stream(StreamConfig.from_dict(skipped), lengths).plan(0, 200).table
    web, pairs = table[table[:, 0] == 0], table[table[:, 0] == 1]
    assert not {17, 99} & set(web[:, 2].tolist())
    assert not {3, 5} & set(pairs[pairs[:, 1] < 150][:, 2].tolist())
    assert f"more than {MOST_WRITTEN} documents" in " ".join(TEXT.split())


def test_the_flags() -> None:
    words = re.search(r"--skip-train-iteration-range (\S+) (\S+?)`", TEXT)
    assert words is not None and [parse_steps(w, "") for w in words.groups()] == [(101, 200), (251, 300)]
