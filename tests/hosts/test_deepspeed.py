"""`megaresume.attach` on real DeepSpeed engines over two gloo processes; scenarios_*.py do, these look."""

from __future__ import annotations

import re
from typing import Any

import pytest

MODEL = "mp_rank_00_model_states.pt"
OPTIMIZER = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
PARTITIONED = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (0, 1)]


def samples(seen: list[Any]) -> list[list[int]]:
    return [numbers for _, numbers, _ in seen]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_resume_continues_bit_for_bit(two_ranks: Any, stage: int) -> None:
    for rank, found in enumerate(two_ranks[f"zero{stage}"]):
        # Micro-step k of rank r: c + k*(D*m) + r*m .. + m, with D = m = 2.
        assert samples(found["whole"]) == [[n, n + 1] for n in range(2 * rank, 48, 4)]
        # Same step, same samples, same loss, to the last bit.
        assert found["again"] == [entry for entry in found["whole"] if entry[0] > 2]
        assert found["digests"][0] == found["digests"][1]
        assert found["client"] == 16 and found["json"]
        workers = stage % 2
        assert found["line"].startswith("megaresume: resumed at sample 16 | digest ")
        assert f"| dp 2->2 workers 0->{workers} mbs 2->2 gbs 8->8 | repeated 0 skipped 0 |" in found["line"]


@pytest.mark.parametrize(
    ("stage", "files"),
    [(0, [MODEL]), (1, [MODEL, *OPTIMIZER]), (2, [MODEL, *OPTIMIZER]), (3, [*PARTITIONED, *OPTIMIZER])],
)
def test_the_expected_files_are_those_that_deepspeed_writes(two_ranks: Any, stage: int, files: list[str]) -> None:
    found = two_ranks[f"zero{stage}"]
    assert found[0]["files"] == sorted(files)
    assert {file for rank in found for file in rank["expected"]} == set(files)


def test_a_save_that_lacks_a_file_is_not_committed(two_ranks: Any) -> None:
    for found in two_ranks["lost_file"]:
        assert found["error"][0] == "CheckpointError"
        assert "incomplete" in found["error"][1] and "zero_pp_rank_1" in found["error"][3]
        assert (found["latest"], found["step"]) == ("global_step2", 2)


def test_a_run_that_was_saved_without_megaresume_is_adopted_if_that_is_asked_for(two_ranks: Any) -> None:
    for found in two_ranks["adopted"]:
        assert found["refused"][0] == "StateError" and "adopt=True" in found["refused"][2]
        assert found["again"] == found["whole"]  # the samples behind those that count as trained, the same losses
        assert found["kept"] == ["32 samples up to global_step4 were trained without megaresume, in another order"]


def test_a_pipeline_resumes_bit_for_bit(two_ranks: Any) -> None:
    for found in two_ranks["pipeline"]:
        assert found["again"] == found["whole"][2:]
        assert found["samples"] == 32
        layers = [f"layer_{k:02d}-model_states.pt" for k in range(4)]
        assert found["files"] == [*layers, MODEL, "mp_rank_01_model_states.pt"]
        assert found["outside"][0] == "UsageError"


def test_faults_of_all_ranks_are_in_every_state(two_ranks: Any) -> None:
    """Those of trained samples, once each, on every rank; a resume has them too, and adds the same."""
    for found in two_ranks["faults"]:
        broken = found["broken"]
        assert len(broken) > 10
        assert found["whole"] == found["own"] == {"total": len(broken), "kept": broken}
        first = [fault for fault in broken if fault[0] < 16]
        assert found["at_2"] == {"total": len(first), "kept": first} and 0 < len(first) < len(broken)
        assert found["again"] == found["whole"]


def test_only_optimizer_steps_count(two_ranks: Any) -> None:
    for rank, found in enumerate(two_ranks["clock"]):
        assert found["samples"] == 8
        assert found["after"] == found["ahead"]
        assert found["after"][0] == [8 + 2 * rank, 9 + 2 * rank]


def test_ramp_up(two_ranks: Any) -> None:
    for rank, found in enumerate(two_ranks["ramp_up"]):
        assert samples(found["whole"]) == [[n, n + 1] for n in range(2 * rank, 48, 4)]
        assert [step for step, *_ in found["whole"]] == [1, 2, 3, 3, 4, 4, 5, 5, 5, 6, 6, 6]
        assert found["again"] == [entry for entry in found["whole"] if entry[0] > 3]
        assert found["batches"] == [[[0, 4], [8, 8], [24, 12]]] * 2


def test_the_engines_own_batch_size_is_followed(two_ranks: Any) -> None:
    for rank, found in enumerate(two_ranks["engine_sizes"]):
        assert samples(found["seen"]) == [[n, n + 1] for n in range(2 * rank, 32, 4)]
        assert [step for step, *_ in found["seen"]] == [1, 2, 3, 3, 3, 4, 4, 4]
        assert found["batches"] == [[0, 4], [8, 12]]


def test_hooks_chain_and_pass_everything_through(two_ranks: Any) -> None:
    for found in two_ranks["hooks"]:
        assert found["calls"] == ["theirs latest=False mine=5", "theirs latest=False mine=None"]
        assert found["same_hook"]
        assert found["returned"] is True
        assert found["mine"] == 5
        assert found["detached"][0] == "StateError"


def test_save_latest_false_moves_no_pointer(two_ranks: Any) -> None:
    for found in two_ranks["hooks"]:
        assert found["latest"] == found["still"] == ["mine", "1"]
        assert (found["path"], found["step"]) == ("mine", 1)


@pytest.mark.parametrize(
    ("case", "kind", "headline"),
    [
        ("attached_late", "StateError", "no data state was restored"),
        ("attached_late_save", "StateError", "no data state was restored"),
        ("other_batches", "StateError", "count different steps"),
        ("key_of_ours", "UsageError", "already has a key 'megaresume'"),
        ("accumulation", "StateError", "without all of its micro-batches"),
        ("no_records", "StateError", "no data state"),
        ("mixed", "CheckpointError", "cannot be loaded"),
        # with records that fit the files: the state within them tells
        ("mixed_state", "StateError", "not the one beside it"),
        ("seed", "StateError", "the data config is not the one"),
        ("corpus", "StateError", "not the corpus"),
        ("ranks_differ", "StateError", "the ranks disagree on the data"),
        ("micro_batches_differ", "StateError", "the ranks disagree on the batches"),
        ("no_data", "UsageError", "the engine has no data"),
        ("sizes", "UsageError", "does not divide over the ranks"),
        ("missing_tag", "CheckpointError", "there is no checkpoint global_step3"),
    ],
)
def test_refused_on_every_rank(two_ranks: Any, case: str, kind: str, headline: str) -> None:
    for found in two_ranks["refusals"]:
        assert found[case][0] == kind
        assert headline in found[case][1]
        assert found[case][2] or found[case][3]


def test_a_failure_of_one_rank_is_raised_on_all(two_ranks: Any) -> None:
    first, second = two_ranks["refusals"]
    assert first["rank_1_fails"][0] == second["rank_1_fails"][0] == "NoFileError"
    assert first["rank_1_fails"][1].startswith("rank 1: ")


def test_a_refused_save_writes_nothing(two_ranks: Any) -> None:
    for found in two_ranks["refusals"]:
        assert found["other_batches_wrote"] == ["False"]


def test_client_state_of_a_load_may_be_saved_again(two_ranks: Any) -> None:
    for found in two_ranks["refusals"]:
        assert found["passed_on"][0] == "no error", found["passed_on"]


def test_no_checkpoint_yet_is_a_fresh_start(two_ranks: Any) -> None:
    for found in two_ranks["refusals"]:
        assert found["no_checkpoint_yet"][0] == "no error"


def test_the_end_of_the_stream_is_the_same_step_on_all_ranks(two_ranks: Any) -> None:
    for found in two_ranks["exhausted"]:
        assert found["error"][0] == "StreamExhausted"
        assert found["steps"] == two_ranks["exhausted"][0]["steps"] == 6


def test_two_ranks_to_one(one_rank: Any, two_ranks: Any) -> None:
    (found,) = one_rank["elastic"]
    assert samples(found["seen"]) == [[n, n + 1, n + 2, n + 3] for n in range(16, 48, 4)]
    assert "| dp 2->1 workers 0->2 mbs 2->4 gbs 8->8 | repeated 0 skipped 0 |" in found["line"]
    assert " | random state reseeded (world 2->1, dp 2->1) | " in found["line"]
    # The mean loss of every step is that of the two ranks, up to the order of the sums.
    whole = [rank["whole"] for rank in two_ranks["zero0"]]
    for step in range(3, 7):
        mine = [float.fromhex(loss) for s, _, loss in found["seen"] if s == step]
        theirs = [float.fromhex(loss) for entries in whole for s, _, loss in entries if s == step]
        assert sum(mine) / len(mine) == pytest.approx(sum(theirs) / len(theirs), rel=1e-5)


def test_another_global_batch_size_goes_on_in_the_same_order(one_rank: Any) -> None:
    (found,) = one_rank["larger_batch"]
    assert samples(found["seen"]) == [[n, n + 1, n + 2, n + 3] for n in range(16, 40, 4)]
    assert [step for step, *_ in found["seen"]] == [3, 3, 3, 4, 4, 4]
    assert found["batches"] == [[0, 8], [16, 12]]
    assert found["samples"] == 40


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_on_other_ranks_is_refused_with_the_command(one_rank: Any, stage: int) -> None:
    kind, headline, action, found = one_rank["partitions"][0][f"zero{stage}"]
    assert kind == "CheckpointError"
    assert "a different number of data-parallel ranks" in headline
    assert "megaresume convert" in action and "--tag global_step6," in action and "elastic=True" in action
    assert f"ZeRO {stage} on 2 data-parallel ranks; 1 now" in found


def test_a_universal_checkpoint_goes_on_with_data_and_optimizer(one_rank: Any) -> None:
    (found,) = one_rank["partitions"]
    assert found["converted"][0] == 0, found["converted"][1]
    assert found["path"] == "global_step6_universal"
    assert samples(found["seen"]) == [[n, n + 1] for n in range(48, 64, 2)]
    assert "repeated 0 skipped 0" in found["line"]
    # Adam's moments came along: ZeRO makes no difference to what is computed.
    assert samples(found["without_zero"]) == samples(found["seen"])
    for mine, other in zip(found["seen"], found["without_zero"], strict=True):
        assert float.fromhex(mine[2]) == pytest.approx(float.fromhex(other[2]), rel=1e-4)


def test_load_universal_left_in_the_config_does_not_go_back(one_rank: Any) -> None:
    (found,) = one_rank["partitions"]
    assert found["forgotten"][0] == "CheckpointError"
    assert "older than the newest" in found["forgotten"][1] and "global_step8" in found["forgotten"][3]
    assert found["afterwards"] == "global_step8"


def test_weights_only_begins_the_data_anew(one_rank: Any) -> None:
    assert one_rank["weights_only"] == [{"step": 0, "first": [0, 1], "resume": True}]


def test_a_damaged_checkpoint_is_passed_over_by_weights_and_data(one_rank: Any) -> None:
    assert one_rank["walk_back"] == [{"path": "global_step4", "step": 4, "samples": 32}]


def test_attached_again_in_the_middle_of_a_run(one_rank: Any) -> None:
    (found,) = one_rank["attached_again"]
    kind, headline, _, _ = found["refused"]
    assert (kind, headline) == ("StateError", "the engine is past its first step, but no data state was restored")
    before, after = found["seen"]
    assert [sample for _, samples, _ in before + after for sample in samples] == list(range(32))


def test_the_working_directory_was_changed(one_rank: Any) -> None:
    (found,) = one_rank["other_working_directory"]
    for name in ("said", "unsaid"):
        save, load, saved, elsewhere = found[name]
        for kind, headline, action, _ in (save, load):
            assert (kind, headline.split(",")[0]) == ("UsageError", "a relative directory of checkpoints")
            assert re.fullmatch(rf"save and load by the absolute path: '/.*/{name}'", action)
        assert (saved, elsewhere) == (["global_step1", "global_step2"], [])
    kind, headline, action, where = found["another"]
    assert (kind, headline) == ("UsageError", "a checkpoint is saved to another directory than the run's")
    assert where.endswith("/another") and "/said" in action
