"""Lightning with FSDP, FSDP2 and DeepSpeed's ZeRO: two ranks on gloo, killed in a save, and resumed.

What was trained is put together from the lines that the training steps wrote: `program.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.release import release

pytest.importorskip("lightning")

from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import ledger_path
from megaresume.program import main
from megaresume.stream.errors import CheckpointError, UsageError
from tests.hosts.lightning.program import attached, run
from tests.hosts.torch.record import items, launch, trained

pytestmark = pytest.mark.process

PROGRAM = Path(__file__).with_name("program.py")


RELEASE = release(
    "`[fsdp-sharded]`, `[fsdp2-full]`, `[zero1]`, `[zero2]`, `[zero3]`: three launches each",
    "the same, `[fsdp2-sharded]`, and `tests/hosts/hugging_face/test_backends.py::test_killed_in_a_save`: `[zero2]`",
)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("fsdp-sharded", marks=RELEASE),
        pytest.param("fsdp2-full", marks=RELEASE),
        pytest.param("fsdp2-sharded"),
        pytest.param("zero1", marks=RELEASE),
        pytest.param("zero2", marks=RELEASE),
        pytest.param("zero3", marks=RELEASE),
    ],
)
def test_killed_in_a_save(tmp_path: Path, strategy: str) -> None:
    run(tmp_path / "whole" / "run", epochs=2)
    order = items(trained(tmp_path / "whole" / "run"))
    directory = tmp_path / "run"
    options = {"batch": 2, "accumulation": 2, "save_every": 8, "trainer": {"sharding": strategy}}
    if strategy.startswith("zero"):
        options["drop_last"] = True
    done = launch(PROGRAM, directory, 2, restarts=1, kill=("save", 16), epochs=2, **options)
    assert done.returncode == 0 and "exitcode: -9" in done.stderr, done.stderr[-5000:]
    assert "repeated 0 skipped 0 | step 8 from global_step8 | random state restored" in done.stdout
    assert items(trained(directory)) == order
    newest = choose(directory, checksums=True)
    assert newest is not None and (newest.tag, newest.rejected) == ("global_step24", ())
    entries = read_ledger(ledger_path(directory)).entries
    assert [(e.iteration, e.samples) for e in entries if e.kind == "finished"] == [(25, 200)]
    assert main(["verify", str(directory)]) == 0
    # The first save after the resume is one in the middle of a step, under the name of a link to this one.
    assert main(["inspect", str(directory / "global_step8"), "--checksums"]) == 0
    links = sorted((tmp_path / "links").iterdir())
    assert [link.name for link in links] == [f"epoch={n}-step={s}.ckpt" for n, s in ((0, 8), (1, 16), (1, 24))]
    other_layouts(directory, links[1], strategy, options)


def other_layouts(directory: Path, link: Path, strategy: str, options: dict[str, object]) -> None:
    """From a link, on one rank; another strategy, or with ZeRO another number of ranks, is refused."""
    done = launch(PROGRAM, directory, 1, attempt=3, epochs=2, ckpt=str(link), **options | {"accumulation": 4})
    if strategy.startswith("zero"):
        assert "DeepSpeed cannot load ZeRO optimizer state on a different number of ranks" in done.stderr
    else:
        assert done.returncode == 0, done.stderr[-5000:]
        assert "resumed at sample 128" in done.stdout and "dp 2->1" in done.stdout
        assert sorted(items(trained(directory))[100:]) == list(range(100))
    if strategy != "fsdp2-full":
        with pytest.raises(CheckpointError, match=r"does not load such a checkpoint(.|\n)*SingleDeviceStrategy now"):
            run(directory, attempt=4, epochs=4)


def test_full_state_under_fsdp1_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"state_dict_type='full'(.|\n)*ModelParallelStrategy"):
        attached(tmp_path / "run", sharding="fsdp-full")
