"""docs/rl.md: its loop, stopped in the middle, and resumed from what it has saved."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.records.prompt_ledger import PromptHistory
from tests.hosts.prompts.simulated import Texts

DOCUMENT = Path(__file__).parents[2] / "docs" / "rl.md"


class Workers:
    """Answer in any order."""

    def __init__(self, seed: int) -> None:
        self._draw, self._out = random.Random(seed), list[Any]()

    @property
    def busy(self) -> int:
        return len({ordinal for ordinal, *_ in self._out})

    def send(self, ordinal: int, ticket: str, rollouts: Any, content: str, version: int) -> None:
        self._out += [(ordinal, ticket, rollout, version, f"{content}: an answer") for rollout in rollouts]

    def receive(self) -> Any:
        return self._out.pop(self._draw.randrange(len(self._out)))


class Stopped(Exception):
    pass


def test_the_loop_of_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (loop,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    saved: dict[str, Any] | None = None

    def start(seed: int, stop: int | None) -> list[list[str]]:
        model: list[list[str]] = [*saved["model"]] if saved else []

        def train(answers: dict[int, str]) -> None:
            if len(model) == stop:
                raise Stopped
            assert sorted(answers) == [0, 1, 2, 3]
            model.append(list(answers.values()))

        def save(checkpoint: Any) -> None:
            nonlocal saved
            saved = json.loads(json.dumps(checkpoint))

        values = {"dataset": Texts("data", 100), "workers": Workers(seed), "groups": {}, "train": train, "save": save}
        exec(loop, values | {"state": saved, "model": model})
        return model

    with pytest.raises(Stopped):
        start(1, 13)
    assert saved is not None and len(saved["model"]) == 10
    with pytest.raises(Stopped):
        start(2, 23)
    model = start(3, None)
    assert len(model) == 30
    assert all(len(answers) == 4 and len(set(answers)) == 1 for answers in model)
    assert max(Counter(answers[0] for answers in model).values()) == 1
    history = PromptHistory.read(tmp_path / "run" / "prompts.jsonl")
    assert history.last is not None
    fates = history.fates(history.last)
    assert (len(fates.trained), fates.problems) == (30, [])
