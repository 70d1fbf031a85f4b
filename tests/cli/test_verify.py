"""Proof, or the first difference."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import yaml

from megaresume.batches.open import open_stream
from megaresume.checkpoint.records.step_file import read_step_file
from megaresume.checkpoint.save.commit import begin_save, commit_save, write_data_config
from megaresume.checkpoint.starts import record_start
from megaresume.data.layout import HEADER_BYTES
from megaresume.stream.errors import StateError
from megaresume.stream.source import same_corpora
from tests.cli.conftest import megaresume


def test_proves_a_run(run):
    done = megaresume("verify", run.save)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "proved: all 7 recorded points are those of one stream of 96 samples" in done.stdout
    assert "DIFFERENT" not in done.stdout
    report = json.loads(megaresume("verify", run.save, "--json").stdout)
    assert report["holds"] and [p["samples"] for p in report["points"]] == [0, 32, 32, 64, 64, 96, 96]


def test_corpora_that_moved(run):
    moved = run.corpora.with_name("elsewhere")
    run.corpora.rename(moved)
    assert megaresume("verify", run.save).returncode == 1
    data = run.data.with_name("moved.yaml")
    data.write_text(run.data.read_text().replace("corpora/", "elsewhere/"))
    done = megaresume("verify", run.save, "--data", data)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", [0, 77, 150])
def test_one_byte_of_a_length_is_found_and_named(run, document):
    idx = run.corpora / "web.idx"
    data = bytearray(idx.read_bytes())
    before = data[HEADER_BYTES + 4 * document]
    data[HEADER_BYTES + 4 * document] ^= 1
    idx.write_bytes(data)
    done = megaresume("verify", run.save)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "web.idx is damaged at document" in done.stdout and "not proved" in done.stdout
    # A document that is too long runs into the next one; one that is too short leaves a gap before it.
    assert f"document {document} has {before ^ 1} tokens, but {before} lie between" in done.stdout
    # The difference shows in the samples from the one on that holds the document.
    stream = open_stream(run.data)
    of_web = [(s.document, n) for n in range(96) for s in stream.plan(n, n + 1).segments(n) if s.source == 0]
    assert ("first difference" in done.stdout) == (document in [d for d, _ in of_web])


def test_other_tokens_of_the_same_lengths(run):
    """No length differs, so every digest is right; a resume, verify and plan refuse all the same."""
    before = open_stream(run.data).state_at(96)
    path = run.corpora / "web.bin"
    path.write_bytes(bytes(reversed(path.read_bytes())))
    with pytest.raises(StateError, match="source 'web' is not the corpus that the state was made with") as error:
        open_stream(run.data, state=before)
    assert "web.contents" in str(error.value.found) and "web.lengths" not in str(error.value.found)
    report = json.loads(megaresume("verify", run.save, "--json").stdout)
    assert not report["holds"] and all(point["holds"] for point in report["points"])
    assert len(report["corpora"]) == 1 and "web.contents" in report["corpora"][0]
    plan = megaresume("plan", run.save, "--data", run.data)
    assert plan.returncode == 1 and "web.contents" in plan.stdout + plan.stderr


def test_one_corpus_under_two_names_is_said(run):
    config = yaml.safe_load(run.data.read_text())
    for end in (".bin", ".idx", ".megaresume.json"):
        shutil.copy(run.corpora / f"code{end}", run.corpora / f"copy{end}")
    config["sources"]["again"] = {"path": "corpora/copy", "weight": 0.1}
    twice = run.data.with_name("twice.yaml")
    twice.write_text(yaml.safe_dump(config, sort_keys=False))
    stream = open_stream(twice)
    (line,) = same_corpora(stream.fingerprints)
    assert line.startswith("sources 'code' and 'again' are one corpus") and "120 documents" in line
    assert not same_corpora(open_stream(run.data).fingerprints)
    # What only lengths are known of may be the same corpus, or not.
    known = {name: dataclasses.replace(f, contents=None) for name, f in stream.fingerprints.items()}
    assert not same_corpora(known)
    plan = megaresume("plan", run.save, "--data", twice, "--on-change", "stage")
    assert line in " ".join(plan.stdout.split())


def test_the_first_differing_sample_is_bracketed(run):
    """A length in use is changed; the difference lies between the two recorded points around its sample."""
    stream = open_stream(run.data)
    plan = stream.plan(0, 96)
    sample, document = next((n, s.document) for n in range(40, 96) for s in plan.segments(n) if s.source == 0)
    idx = run.corpora / "web.idx"
    data = bytearray(idx.read_bytes())
    data[HEADER_BYTES + 4 * document] ^= 1
    idx.write_bytes(data)
    report = json.loads(megaresume("verify", run.save, "--json").stdout)
    first, stop = report["first_difference"]["samples"]
    assert first <= sample < stop + 32 and first in (0, 32, 64)


def test_the_last_length_does_not_even_open(run):
    idx = run.corpora / "web.idx"
    data = bytearray(idx.read_bytes())
    data[HEADER_BYTES + 4 * 299] ^= 1
    idx.write_bytes(data)
    done = megaresume("verify", run.save)
    assert done.returncode == 1 and "than its index says" in done.stderr and "Traceback" not in done.stderr


def test_a_corpus_with_other_lengths_that_fit_each_other(run):
    """The same number of documents and tokens in another order: only the hash of their lengths tells."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    old = IndexedDataset(str(run.corpora / "web"))
    documents = [np.array(old[i]) for i in range(len(old))]
    documents.reverse()
    del old
    import torch

    builder = IndexedDatasetBuilder(str(run.corpora / "web.bin"), dtype=np.uint16)
    for document in documents:
        builder.add_document(torch.from_numpy(document.astype(np.int32)), [len(document)])
    builder.finalize(str(run.corpora / "web.idx"))
    report = json.loads(megaresume("verify", run.save, "--json").stdout)
    assert not report["holds"]
    assert "web.lengths" in report["corpora"][0] and "web.documents" not in report["corpora"][0]
    assert report["first_difference"]["recomputed"] != report["first_difference"]["recorded"]


def test_a_damaged_ledger_line_is_no_proof(run):
    """What it said is not known: the other lines must not pass for all."""
    ledger = run.save / "megaresume" / "ledger.jsonl"
    intact = ledger.read_bytes()
    ledger.write_bytes(intact.replace(b'"samples": 64', b'"samples": 65'))
    done = megaresume("verify", run.save)
    assert done.returncode == 1 and "proved: all" not in done.stdout
    assert "NOT READ   ledger line 3 is damaged" in done.stdout

    ledger.write_bytes(intact + intact[:100])  # a writer was killed while appending
    done = megaresume("verify", run.save)
    assert done.returncode == 0 and "ledger line 5 is torn" in done.stdout


def test_bad_input(run):
    done = megaresume("verify", run.corpora)
    assert done.returncode == 1 and "there is nothing to verify" in done.stderr
    (run.save / "megaresume" / "data.yaml").unlink()
    done = megaresume("verify", run.save)
    assert done.returncode == 2 and "--data DATA.yaml" in done.stderr
    state = run.save / "megaresume" / "step_0000004.json"
    state.write_bytes(state.read_bytes()[:-40])
    done = megaresume("verify", run.save, "--data", run.data)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    shutil.rmtree(run.save / "megaresume")
    assert megaresume("verify", run.save, "--data", run.data).returncode == 1


def test_a_split_that_was_a_flag(run, tmp_path):
    """The run's config was given with --split; the data.yaml passed to verify does not have it.

    The training part is the beginning of the corpus, as of one that has grown since: it is found either way.
    """
    from megaresume.checkpoint.save.commit import begin_save, commit_save

    stream = open_stream(run.data, split="8,1,1")
    save = tmp_path / "split"
    pending = begin_save(save, tag="global_step2", iteration=2, state=stream.state_at(16, batches=[(0, 8)]))
    (save / "global_step2").mkdir()
    (save / "global_step2" / "model.pt").write_bytes(b"weights")
    commit_save(pending, expected_files=["model.pt"])
    for flags in ((), ("--split", "8,1,1")):
        done = megaresume("verify", save, "--data", run.data, *flags)
        assert done.returncode == 0, done.stdout + done.stderr
    assert megaresume("verify", save, "--data", run.data, "--split", "7,2,1").returncode == 1


def test_a_branch_that_was_given_up_is_not_judged(run):
    """Back to step 4, with another packing from there: what steps 8 and 12 saved is no part of the run any more."""
    state = read_step_file(run.save / "megaresume" / "step_0000004.json").state
    text = run.data.read_text().replace("best_fit", "split")
    run.data.write_text(text)
    stream = open_stream(run.data, state=state, on_change="stage")
    record_start(run.save, iteration=4, state=stream.state_at(32), choice=None)
    pending = begin_save(run.save, tag="global_step6", iteration=6, state=stream.state_at(48, batches=[(0, 8)]))
    (run.save / "global_step6").mkdir()
    (run.save / "global_step6" / "weights").write_bytes(b"w")
    commit_save(pending)
    write_data_config(run.save, stream.origin)
    done = megaresume("verify", run.save)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "given up   branch 1, steps 5 to 12: the start of 20" in done.stdout and "sample         48" in done.stdout
    # But what was not given up is judged: the same without the ledger, which alone tells.
    (run.save / "megaresume" / "ledger.jsonl").unlink()
    assert megaresume("verify", run.save).returncode == 1


def test_a_source_that_was_removed_is_asked_for(run):
    recorded = run.save / "megaresume" / "data.yaml"
    mapping = yaml.safe_load(recorded.read_text())
    del mapping["sources"]["code"]
    recorded.write_text(yaml.safe_dump(mapping))
    done = megaresume("verify", run.save)
    assert done.returncode == 1 and f"--data with a copy of {recorded} that has code too" in done.stderr
    assert megaresume("verify", run.save, "--data", run.data).returncode == 0
