"""What of `megaresume.attach` for torchft needs no torchft: who trains what, what proves it, and what is refused."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import megaresume
from megaresume.checkpoint.records.rank_log import RankLog
from megaresume.checkpoint.settings import Checkpoints
from megaresume.hosts import torchft, torchft_dealing, torchft_dealt, torchft_steps
from megaresume.hosts.torchft import attach
from megaresume.hosts.torchft_dealing import Ballot, Contributors, Rule, Share
from megaresume.runs.rank_steps import read_rank_steps
from megaresume.stream.dealing import in_even_parts, places_of
from megaresume.stream.errors import MegaresumeError, StateError, UsageError


@pytest.mark.parametrize(
    ("samples", "micro", "size"), list(itertools.product((1, 6, 8, 32), (1, 2, 3, 8), (1, 2, 3, 5, 8)))
)
def test_all_of_a_step_is_dealt_whoever_is_there(samples: int, micro: int, size: int) -> None:
    sizes = in_even_parts(samples, micro_batch_size=micro, dp_size=size)
    assert sum(sizes) == samples and len(sizes) == -(-samples // (micro * size)) and max(sizes) - min(sizes) <= 1
    shares = [Share(size, rank, size).sizes(samples, micro) for rank in range(size)]
    for number, whole in enumerate(sizes):
        mine = [share[number][1] for share in shares]
        assert sum(mine) == whole and max(mine) <= micro and max(mine) - min(mine) <= 1
    assert all(mine == 0 for _, mine in Share(size, None, size).sizes(samples, micro))


@pytest.mark.parametrize(
    ("replicas", "index", "processes", "samples", "shares"),
    [
        ((0, 1, 2), 1, 1, 8, [Share(3, 1, 3)]),
        ((0, 2), 1, 2, 8, [Share(4, 2, 6), Share(4, 3, 6)]),  # replica 1 is being healed
        ((0, 2), None, 2, 8, [Share(4, None, 6), Share(4, None, 6)]),  # this is replica 1
        ((0, 1, 2), 1, 2, 3, [Share(3, 2, 6), Share(3, None, 6)]),  # more processes than samples
        ((), None, 1, 8, [Share(1, None, 3)]),  # all are being healed
    ],
)
def test_who_trains_what(
    replicas: tuple[int, ...], index: int | None, processes: int, samples: int, shares: list[Share]
) -> None:
    contributors = Contributors(replicas, index, 3, processes, samples)
    assert [contributors.share(process) for process in range(processes)] == shares


@pytest.mark.parametrize(
    ("size", "processes", "samples", "micro"), list(itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 5, 8), (1, 2, 8)))
)
def test_what_the_replicas_vote_for_is_a_step(size: int, processes: int, samples: int, micro: int) -> None:
    replicas = tuple(range(size))
    votes = [Contributors(replicas, k, size, processes, samples).samples_here(micro) for k in replicas]
    assert sum(votes) == samples
    assert Contributors(replicas, None, size, processes, samples).samples_here(micro) == 0


def loader(**options: Any) -> megaresume.DataLoader:
    """Forty items of an epoch; micro-batches of two, without torch.distributed."""
    return megaresume.DataLoader(list(range(40)), batch_size=2, seed=5, dp_rank=0, dp_size=1, **options)


def live(size: int, rank: int, step: int) -> list[list[list[int]]]:
    """The first three steps of a rank: the items of each micro-batch."""
    one = loader()
    one.is_live, one.schedule = True, type(one.schedule).constant(step)
    one.dp_size, one.dp_rank = size, rank
    count = len(in_even_parts(step, micro_batch_size=2, dp_size=size))
    batches = [batch.tolist() for batch in itertools.islice(one, 3 * count)]
    return [batches[first : first + count] for first in range(0, 3 * count, count)]


def test_as_any_other_loader_where_the_step_divides() -> None:
    """The canonical order: the same micro-batches, for the same ranks."""
    whole = [item for batch in itertools.islice(loader(), 12) for item in batch.tolist()]
    for rank in range(2):
        for number, step in enumerate(live(2, rank, 8)):
            firsts = [8 * number + 4 * part + 2 * rank for part in range(2)]
            assert step == [whole[first : first + 2] for first in firsts]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_the_ranks_make_up_the_step_in_order(size: int) -> None:
    whole = [item for batch in itertools.islice(loader(), 12) for item in batch.tolist()]
    ranks = [live(size, rank, 8) for rank in range(size)]
    for number in range(3):
        handed: list[int] = []
        for part, samples in enumerate(in_even_parts(8, micro_batch_size=2, dp_size=size)):
            for rank in range(size):
                place = next(places_of([samples], dp_rank=rank, dp_size=size))
                items = ranks[rank][number][part]
                assert len(items) == max(place.stop - place.start, 1)  # the first sample, if it has none
                handed += items[: place.stop - place.start]
        assert handed == whole[8 * number : 8 * number + 8]


RULE = Rule({"batch_size": "2", "data": "0011"})
#: what a replica with this rule adds to a vote.
ONE = (1, RULE.number, RULE.number**2)


@pytest.mark.parametrize(
    ("others", "membership"),
    [((4, 16, 0, 1), 7), ((0, 0, 0, 0), None), ((4, 8, 0, 1), None), ((8, 16, 0, 1), None), ((4, 16, 0, 0), None)],
    ids=["whole", "the other one is not there", "in another step", "it has too many", "it has a micro-batch less"],
)
def test_a_step_counts_if_the_replicas_make_it_up(others: tuple[int, ...], membership: int | None) -> None:
    reported: list[Exception] = []

    def allreduce(tensor: torch.Tensor, reduce_op: Any) -> Any:
        """What the other replica says is added."""
        tensor += torch.tensor([*others, *(ONE if any(others) else (0, 0, 0))])
        return SimpleNamespace(wait=lambda: None)

    of_torchft = SimpleNamespace(allreduce=allreduce, errored=lambda: None, report_error=reported.append)
    place: dict[str, Any] = {"position": 16, "membership": 7, "begins_anew": True, "device": torch.device("cpu")}
    place["rule"] = RULE
    ballot = Ballot(of_torchft, samples=4, needed=8, contributes=True, replicas=2, **place)
    assert [ballot.decide(), ballot.decide()] == [membership, membership]
    assert len(reported) == (membership is None)


def test_a_replica_that_is_being_healed_commits_with_the_others() -> None:
    """It contributes nothing, and is still at the position that it came with."""
    others = SimpleNamespace(wait=lambda: None)
    of_torchft = SimpleNamespace(
        allreduce=lambda tensor, reduce_op: tensor.add_(torch.tensor([8, 32, 7, 1, *ONE])) is None or others,
        errored=lambda: None,
        report_error=lambda error: pytest.fail(str(error)),
    )
    place: dict[str, Any] = {"position": 16, "membership": 0, "begins_anew": True, "device": torch.device("cpu")}
    place["rule"] = RULE
    ballot = Ballot(of_torchft, samples=0, needed=8, contributes=False, replicas=1, **place)
    assert ballot.decide() == 7


@pytest.mark.parametrize("others", [(4, 16, 0, 1), (2, 16, 0, 1)], ids=["as many samples", "fewer"])
@pytest.mark.parametrize("contributes", [True, False])
def test_replicas_that_deal_by_other_rules_end(others: tuple[int, ...], contributes: bool) -> None:
    """Of four samples in micro-batches of 2 and of 1, both have two; the same ones or not."""
    other = Rule({**RULE.parts, "batch_size": "1"})
    theirs = [*others, 1, other.number, other.number**2]
    if not contributes:  # two others do, and differ
        theirs = [one + more for one, more in zip(theirs, [*others, *ONE], strict=True)]
    of_torchft = SimpleNamespace(
        allreduce=lambda tensor, reduce_op: (
            tensor.add_(torch.tensor(theirs)) is None or SimpleNamespace(wait=lambda: None)
        ),
        errored=lambda: None,
        report_error=lambda error: None,
    )
    place: dict[str, Any] = {"position": 16, "membership": 7, "begins_anew": True, "device": torch.device("cpu")}
    ballot = Ballot(of_torchft, samples=4, needed=8, contributes=contributes, replicas=2, rule=RULE, **place)
    with pytest.raises(StateError, match=r"deal out different steps(.|\n)*batch_size 2"):
        ballot.decide()


def test_a_replica_that_is_given_the_weights_of_another_deals_as_it_does() -> None:
    RULE.check_of_sender(RULE.parts)
    with pytest.raises(StateError, match=r"batch_size 2; on other replicas: batch_size 1\n"):
        RULE.check_of_sender({**RULE.parts, "batch_size": "1"})


def test_the_rule_of_a_replica() -> None:
    """Everything by which samples are dealt, and of the data also what a restored state would not tell."""

    def rule(samples: int = 8, **options: Any) -> Rule:
        one = loader(**options)
        steps: Any = SimpleNamespace(feed=SimpleNamespace(loader=one))
        dealt = torchft_dealt.DealtSteps(
            manager(), steps, samples=samples, step_begins=lambda: None, quorum_is_there=lambda: None
        )
        one.dp_size = 3  # it is dealt to so many at the moment
        one.micro_batch_size = 1
        return dealt.rule

    assert rule() == rule() and rule().number == rule().number
    others = [rule(6), rule(skip=["8:16"]), rule(skip={"documents": {"data": [3]}}), rule(keyed=True)]
    assert len({rule().number, *(one.number for one in others)}) == 5


def steps_of(log: RankLog, *, launch: int, step: int, rank: int, events: str, first: int) -> None:
    """Votes (v) and decided steps (s), of 4 samples each; step after step."""
    place: dict[str, Any] = {"dp_rank": rank, "dp": 2, "micro_batch_size": 2, "launch": launch}
    log.start(step=step, samples=step * 4, pad_id=0, digest="0" * 16, **place)
    number = step
    for event in events:
        number += event == "v"
        samples = np.arange(2) + (number - 1) * 4 + 2 * rank
        log.note_planned("vote" if event == "v" else "step", number, samples, samples.astype(np.uint64))


def test_a_step_counts_if_one_replica_says_so(tmp_path: Path) -> None:
    """The other one had voted, and died or did not hear of it. Another launch does again what nobody decided."""
    for rank, events in ((0, "vsvsv"), (1, "vsvv")):
        log = RankLog(tmp_path, rank=rank, launch=0)
        steps_of(log, launch=100, step=0, rank=rank, events=events, first=0)
        log.close()
    found = read_rank_steps(tmp_path)
    assert {step: [line.dp_rank for line in lines] for step, lines in found.steps.items()} == {1: [0, 1], 2: [0, 1]}
    assert found.gaps == () and found.lost == ()
    log = RankLog(tmp_path, rank=2, launch=0)
    steps_of(log, launch=200, step=1, rank=0, events="vs", first=1)
    log.close()
    found = read_rank_steps(tmp_path)  # whoever decided step 2 has died: it was made again
    assert [line.rank for line in found.steps[2]] == [2] and {line.step for line, _ in found.lost} == {2}


def test_a_step_counts_if_another_launch_goes_on_from_it(tmp_path: Path) -> None:
    """Both who had trained step 2 died, and a third one that was being healed committed it."""
    for rank in (0, 1):
        log = RankLog(tmp_path, rank=rank, launch=0)
        steps_of(log, launch=100, step=0, rank=rank, events="vsv", first=0)
        log.close()
    log = RankLog(tmp_path, rank=2, launch=0)
    steps_of(log, launch=200, step=2, rank=0, events="vs", first=2)
    log.close()
    found = read_rank_steps(tmp_path)
    assert {step: [line.rank for line in lines] for step, lines in found.steps.items()} == {
        1: [0, 1],
        2: [0, 1],
        3: [2],
    }
    assert found.gaps == () and found.lost == ()


def test_what_a_replica_made_alone_beside_the_others_is_lost(tmp_path: Path) -> None:
    """Two quorums at a time, after a lighthouse was started again: the others went on, and it joins them later."""
    for rank in (0, 1, 2):
        log = RankLog(tmp_path, rank=rank, launch=0)
        steps_of(log, launch=100, step=0, rank=rank % 2, events="vs", first=0)
        if rank < 2:
            steps_of(log, launch=150, step=1, rank=rank, events="vsvsvs", first=1)
            steps_of(log, launch=300, step=4, rank=rank, events="vs", first=4)
        else:
            steps_of(log, launch=200, step=1, rank=0, events="vsvsv", first=1)
            steps_of(log, launch=400, step=5, rank=0, events="vs", first=5)
        log.close()
    found = read_rank_steps(tmp_path)
    assert {step: [line.rank for line in lines] for step, lines in found.steps.items()} == {
        1: [0, 1, 2],
        2: [0, 1],
        3: [0, 1],
        4: [0, 1],
        5: [0, 1],
        6: [2],
    }
    assert found.gaps == () and [(line.step, line.rank) for line, _ in found.lost] == [(2, 2), (3, 2)]


def names_of_torchft() -> list[str]:
    """What the source reads of torchft's Manager, and what it hooks."""
    found = {"start_quorum", "allreduce", "should_commit"}
    for module in (torchft, torchft_dealing, torchft_dealt, torchft_steps):
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
            if isinstance(node, ast.Attribute):
                owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
                if owner in ("manager", "_manager", "trainer"):
                    found.add(node.attr)
    return sorted(found)


def manager(**values: Any) -> Any:
    """With all that is looked for."""
    known = {"current_step": lambda: 0, "_use_async_quorum": True}
    return SimpleNamespace(**dict.fromkeys(names_of_torchft()) | known | values)


@pytest.mark.parametrize("name", names_of_torchft())
def test_another_version_of_torchft_is_refused(name: str, tmp_path: Path) -> None:
    """Before the run begins, whatever it lacks: not in the middle of it with an AttributeError."""
    of_torchft = manager()
    delattr(of_torchft, name)
    with pytest.raises(UsageError, match=rf"not a Manager of torchft's(.|\n)*without {name}\b"):
        attach(of_torchft, loader(), global_batch_size=8, checkpoints=Checkpoints(save_dir=tmp_path))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"manager": SimpleNamespace()}, "this is not a Manager of torchft's"),
        ({"manager": manager(current_step=lambda: 3)}, "the manager has made steps before it was attached"),
        ({"global_batch_size": 0}, "bad global_batch_size"),
        ({"checkpoints": Checkpoints()}, "cannot save by these checkpoints"),
        ({"checkpoints": Checkpoints(save_dir="a", stage_to="b")}, "stage_to cannot be used"),
        ({"data": {"batch_size": 2, "accumulation": 2}}, "accumulation cannot be used"),
        ({"data": {"max_epochs": 2}}, "the last step of the data may be short"),
        ({"data": None}, "needs a loader of megaresume's"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    data = given.get("data", {})
    options = {"manager": manager(), "global_batch_size": 8, "checkpoints": Checkpoints(save_dir=tmp_path)} | given
    options["data"] = None if data is None else megaresume.DataLoader(list(range(40)), **{"batch_size": 2} | data)
    with pytest.raises(MegaresumeError, match=words):
        attach(options.pop("manager"), options.pop("data"), **options)
