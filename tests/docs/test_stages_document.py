"""docs/changing-data.md: the data config with stages, as it stands there."""

from __future__ import annotations

import re

import yaml

from megaresume.stream.batches import BatchSchedule
from megaresume.stream.config import StreamConfig
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList
from tests.docs.pages import section


def test_the_config() -> None:
    text, renamed = re.findall(r"```yaml\n(.*?)```", section("changing-data.md", "A new stage"), flags=re.DOTALL)
    config = StreamConfig.from_dict(yaml.safe_load(text))
    sources = [LengthList([20 + (7 * i + k) % 300 for i in range(900)]) for k in range(3)]
    stream = Stream(config, sources)
    stream.schedule = BatchSchedule.constant(2)
    stages = stream.state_at(1200).stages
    assert [s.name for s in stages] == ["start", "stage 1", "long"]
    assert stages[2].first == 1000 and stream.config_at(1000).seq_length == 512
    tokens = stream.plan(0, stages[1].first).tokens()
    assert tokens.sum() >= 100_000 > tokens[:-1].sum()
    assert 2 not in stream.plan(0, stages[1].first).table[:, 0] and 2 in stream.plan(400, 1200).table[:, 0]
    data = yaml.safe_load(text) | yaml.safe_load(renamed)
    data["sources"] |= {"code": {}, "wiki": {"weight": 0}}
    again = StreamConfig.from_dict(data | {"stages": None})
    assert again.sources[0].name == "web" and again.sources[0].label == "crawl"
    state = stream.state_at(10)
    stream = Stream(again, sources, state=state, on_change="stage")
    assert stream.state_at(20).sources["web"].position > state.sources["web"].position
