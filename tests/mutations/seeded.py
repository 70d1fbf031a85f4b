"""The defects: a piece of the package, what stands in its place, and the tests that have to find it.

The piece stands exactly once in the package, so that it is found wherever its file is moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

COMMIT = ("tests/checkpoint/test_commit.py",)
ACCEPTING = ("tests/checkpoint/test_accepting.py",)
CHOOSE = ("tests/checkpoint/test_choose.py",)
CONFIRM = ("tests/checkpoint/test_confirm.py",)
DURABLE = ("tests/checkpoint/test_durable.py",)
COUNT = ("tests/hosts/test_count.py",)
ENGINE = ("tests/hosts/test_deepspeed.py",)
LEDGER = ("tests/checkpoint/test_ledger.py",)
LOCK = ("tests/checkpoint/test_lock.py",)
MANIFEST = ("tests/checkpoint/test_manifest.py",)
PROGRESS = ("tests/checkpoint/test_progress.py",)
RETENTION = ("tests/checkpoint/test_retention.py",)
STATE = ("tests/checkpoint/test_data_state.py", "tests/checkpoint/test_state_file.py")
LOOP = ("tests/hosts/torch/test_habits.py",)
FROZEN = ("tests/hosts/test_frozen.py",)
FROZEN_SUMS = ("tests/hosts/hugging_face/test_frozen.py",)


@dataclass(frozen=True)
class Mutation:
    """One defect."""

    #: what it does, in words.
    name: str
    old: str
    new: str
    #: files of tests, or single tests, of which one fails.
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return self.name

    @cached_property
    def path(self) -> str:
        """The file that it changes, relative to the checkout. Raises LookupError unless there is exactly one place."""
        places = [
            path.relative_to(ROOT).as_posix()
            for path in sorted((ROOT / "megaresume").rglob("*.py"))
            for _ in range(path.read_text(encoding="utf-8").count(self.old))
        ]
        if len(places) != 1:
            raise LookupError(f"{self.name}: {self.old!r} stands in {places or 'no file'}")
        return places[0]

    @property
    def text(self) -> str:
        """The file with the defect."""
        return (ROOT / self.path).read_text(encoding="utf-8").replace(self.old, self.new)

    def apply(self, tree: Path) -> None:
        """Change a copy of the checkout."""
        (tree / self.path).write_text(self.text, encoding="utf-8")


CHECKPOINT = (
    Mutation(
        "commit a save that another one has overtaken",
        "    _check_not_overtaken(pending)\n    if part",
        "    if part",
        COMMIT,
    ),
    Mutation("commit without the files beside it", "    _check_beside(root, record.tag, others)\n", "", COMMIT),
    Mutation("commit with an empty file", "if sizes.get(name) == 0]\n", "if False]\n", COMMIT),
    Mutation(
        "commit with a missing file", "for name in wanted if name not in sizes]", "for name in wanted if False]", COMMIT
    ),
    Mutation("commit with another layout's file", "for name in unlisted(sizes, wanted)]", "for name in ()]", COMMIT),
    Mutation(
        "call a fresh commit durable",
        "        durable=False,\n        boots=pending",
        "        durable=True,\n        boots=pending",
        DURABLE,
    ),
    Mutation("leave latest where it was", "    if marker.latest:\n", "    if False:\n", COMMIT),
    Mutation("leave the tracker where it was", "    if marker.tracker:\n", "    if False:\n", COMMIT),
    Mutation("move latest although it is not ours", "    if marker.latest:\n", "    if True:\n", COMMIT),
    Mutation(
        "leave the commit out of the ledger",
        'append_ledger(ledger_path(root), record.ledger_entry("checkpoint", with_attempt(details)))\n',
        "pass\n",
        COMMIT,
    ),
    Mutation(
        "leave the marker of a save that is over",
        "    remove_marker(marker_path(root, record.iteration, record.tag))\n\n\ndef record_commit",
        "\n\ndef record_commit",
        COMMIT,
    ),
    Mutation(
        "begin a save without a marker",
        "    write_marker(marker_path(root, iteration, tag), marker)\n    return",
        "    return",
        COMMIT,
    ),
    Mutation(
        "forget the state of a step saved again",
        "    notes = keep_superseded(root, record)\n",
        "    notes: tuple[str, ...] = ()\n",
        COMMIT,
    ),
    Mutation(
        "delete a committed save that is given up",
        "    if manifest_path(root, iteration, tag).exists() or (\n",
        "    if (\n",
        ("tests/hosts/test_retries.py", *COMMIT),
    ),
    Mutation(
        "take a longer file for the one that was saved",
        "    if size != entry.size:\n        detail",
        "    if size < entry.size:\n        detail",
        MANIFEST,
    ),
    Mutation(
        "compare no checksum",
        "            elif checksum != checked[path].checksum:\n",
        "            elif False:\n",
        MANIFEST,
    ),
    Mutation("leave the files of ranks unread", " + self.verify_beside(tag_dir.parent)\n", "\n", MANIFEST),
    Mutation("pass over files of another layout", " + _unlisted_problems(tag_dir, self.files)", "", MANIFEST),
    Mutation(
        "trust what a power cut may have torn",
        "        return self.durable or (bool(self.boots) and boots_up().issuperset(self.boots))",
        "        return True",
        DURABLE,
    ),
    Mutation(
        "call some checksums all",
        "        return all(entry.checksum is not None for entry in self.files)",
        "        return any(entry.checksum is not None for entry in self.files)",
        MANIFEST,
    ),
    Mutation("read a manifest below the root", ' or ".." in path.split("/"):', ":", MANIFEST),
    Mutation(
        "pair the state of one save with another's manifest",
        "    if record.save_id != manifest.save_id or record.state.digest != manifest.digest:\n",
        "    if False:\n",
        CHOOSE,
    ),
    Mutation(
        "load a step that is half saved again",
        "    if marker is not None and marker.save_id != manifest.save_id:\n",
        "    if False:\n",
        CHOOSE,
    ),
    Mutation(
        "load what was never durable", "    if in_doubt and not manifest.has_checksums:\n", "    if False:\n", DURABLE
    ),
    Mutation(
        "compare sizes alone where a power cut was",
        '"checksums" if checksums or in_doubt else "sizes"',
        '"checksums" if checksums else "sizes"',
        DURABLE,
    ),
    Mutation(
        "pass over a newer format",
        "    except NewerFormatError:\n        raise\n    except MegaresumeError as error:\n        return None, error",
        "    except MegaresumeError as error:\n        return None, error",
        CHOOSE,
    ),
    Mutation("take the oldest", "key=lambda c: (-c.order,", "key=lambda c: (c.order,", CHOOSE),
    Mutation(
        "load weights of 0 bytes",
        '    empty = [f"{e.path} has 0 bytes" for e in weights if e.size == 0]\n',
        "    empty: list[str] = []\n",
        CHOOSE,
    ),
    Mutation(
        "let a rank load another save",
        "    if (record.state.digest, record.save_id) != (chosen.state.digest, chosen.save_id):\n",
        "    if False:\n",
        CONFIRM,
    ),
    Mutation(
        "let a rank load what it does not see",
        "        if seen is None:\n            return record\n",
        "        if True:\n            return record\n",
        CONFIRM,
    ),
    Mutation(
        "read the state of another iteration",
        '    if envelope.iteration != fields["iteration"]:\n',
        "    if False:\n",
        STATE,
    ),
    Mutation(
        "overwrite other data of the same step",
        "        if digest == record.state.digest and old.tag == record.tag:\n",
        "        if True:\n",
        COMMIT,
    ),
    Mutation(
        "accept a state that was edited",
        '    if fields.get("checksum") != checksum(body):\n',
        "    if False:\n",
        STATE,
    ),
    Mutation(
        "accept a stream elsewhere than its envelope says",
        "    if (state.samples, state.digest) != (samples, digest):\n        raise ValueError",
        "    if False:\n        raise ValueError",
        STATE,
    ),
    Mutation(
        "glue a line to a torn one",
        '(b"\\n" if is_torn(descriptor) else b"")',
        'b""',
        LEDGER,
    ),
    Mutation(
        "give up the step that a start went back to",
        "        while self._live and -self._live[0][0] > after:\n",
        "        while self._live and -self._live[0][0] >= after:\n",
        LEDGER,
    ),
    Mutation(
        "tell the branch of a start by its step",
        "            loaded = self._saved.get(_save_of(entry), -1)\n",
        "            loaded = -1\n",
        LEDGER,
    ),
    Mutation(
        "count what was given up",
        "            known[entry.iteration, entry.tag] = branch is not None\n",
        "            known[entry.iteration, entry.tag] = False\n",
        LEDGER,
    ),
    Mutation(
        "write where another job is alive",
        "        if now not in (first, RELEASED):\n            raise",
        "        if now is None:\n            raise",
        LOCK,
    ),
    Mutation("write past the fence", "drafts=None if lock is None else lock.drafts)", "drafts=None)", LOCK),
    Mutation(
        "leave the last owner its directory",
        "    for other in others:\n        remove(root, other)\n    return True\n",
        "    return True\n",
        LOCK,
    ),
    Mutation(
        "hold what a later number has taken",
        "    if any(other > number for other in others):\n",
        "    if False:\n",
        LOCK,
    ),
    Mutation(
        "hold what was taken over",
        "        if self.drafts.is_dir() and newest(self.root) == self.number:\n",
        "        if True:\n",
        LOCK,
    ),
    Mutation("hold in a child what its parent holds", "    _held.clear()\n", "", LOCK),
    Mutation(
        "prune what a pointer names",
        "        if (every or candidate in named or os.path.islink(root / tag)) and is_enough:\n",
        "        if (every or os.path.islink(root / tag)) and is_enough:\n",
        RETENTION,
    ),
    Mutation(
        "prune for a checkpoint that is not durable",
        "        durable += examined.manifest.durable and (iteration, tag) not in given_up\n",
        "        durable += (iteration, tag) not in given_up\n",
        RETENTION,
    ),
    Mutation(
        "let branches that were given up push others out",
        "        durable += examined.manifest.durable and (iteration, tag) not in given_up\n",
        "        durable += examined.manifest.durable\n",
        RETENTION,
    ),
    Mutation(
        "prune what is newer than the commit",
        " or iteration is None or iteration > committed.iteration:\n            continue\n        # In progress",
        " or iteration is None:\n            continue\n        # In progress",
        RETENTION,
    ),
    Mutation(
        "keep one less",
        "        is_enough = durable >= (retention.keep_last or 1)\n",
        "        is_enough = durable + 1 >= (retention.keep_last or 1)\n",
        RETENTION,
    ),
    Mutation(
        "save over a run that was not loaded",
        "    choice = choose(directory)\n    if choice is None:\n        return\n",
        "    choice = choose(directory)\n    return\n",
        CHOOSE,
    ),
    Mutation(
        "start for ever without progress",
        "    if len(failed) < max_starts:\n        return\n",
        "    if True:\n        return\n",
        PROGRESS,
    ),
    Mutation(
        "finish no commit that was cut off",
        "        if own is not None and (own.tag, own.iteration) == (record.tag, record.iteration):\n",
        "        if False:\n",
        ("tests/checkpoint/test_kill.py::test_a_start_that_finishes_a_killed_commit", *COMMIT),
    ),
)

SESSION = (
    Mutation(
        "save to another directory than the run's",
        "        if self.save_dir is not None and root.resolve() != self.save_dir.resolve():\n",
        "        if False:\n",
        ENGINE,
    ),
    Mutation(
        "split a run when the working directory changes",
        "        if not os.path.isabs(directory) and (now := _working_directory()) != self._home:\n",
        "        if (now := self._home) is None:\n",
        ENGINE,
    ),
    Mutation(
        "load weights without their data",
        "            if beside is None and choice.record is None and not (weights_only or adopts):\n",
        "            if False:\n",
        ENGINE,
    ),
    Mutation(
        "pair weights with the data of another step",
        "    if envelope.iteration != read.iteration or read.samples not in (None, envelope.samples):\n",
        "    if False:\n",
        ACCEPTING,
    ),
    Mutation(
        "pair weights with another state beside them",
        "    if beside is not None and beside.state != envelope.state:\n",
        "    if False:\n",
        ACCEPTING,
    ),
    Mutation(
        "train data that came back at another place", "    if sample not in (None, trained):\n", "    if False:\n", LOOP
    ),
    Mutation(
        "measure the place of the data by its state",
        "    sample = data.next_sample()\n",
        "    sample: int | None = trained\n",
        LOOP,
    ),
    Mutation(
        "load damaged files",
        "return None if is_compared or not self._checksums else find_damage(choice)\n",
        "return None\n",
        ("tests/hosts/test_damaged.py", *ENGINE),
    ),
    Mutation(
        "save a state that no resume can read", "        if is_rank_0():\n            data.read_back(state)\n", "", LOOP
    ),
    Mutation(
        "leave the end out of the ledger",
        "        on_rank_0(lambda: _record_end(root, iteration, data.snapshot(samples), topology))\n",
        "",
        LOOP,
    ),
    Mutation(
        "save a step twice when it is stopped",
        "        self.settled_step = state.iteration\n        if self.meter",
        "        if self.meter",
        LOOP,
    ),
    Mutation(
        "keep the lock after the end",
        "            for directory in filter(self._is_last, self._claimed):\n                release(directory)\n",
        "            pass\n",
        LOOP,
    ),
    Mutation(
        "go on without the random state",
        "            words = self.random.restore(choice, loaded.topology, now, seed=seed_of(state))\n",
        "            words = None\n",
        ("tests/hosts/test_generators.py", "tests/hosts/test_random_state.py", *LOOP),
    ),
)

THE_COUNT = (
    Mutation(
        "hand out more than a step",
        "        self.check_more()\n        self.out.append",
        "        self.out.append",
        COUNT,
    ),
    Mutation("call half a step whole", "end - self.samples >= self.size\n", "end >= self.samples\n", COUNT),
    Mutation("forget that the data has ended", "is_last or end - self.samples", "end - self.samples", COUNT),
    Mutation(
        "count no sample as trained",
        "        self.samples = self.end if self.reads else self.samples + self.size\n",
        "        self.samples = self.samples if self.reads else self.samples + self.size\n",
        COUNT,
    ),
    Mutation(
        "count a step twice",
        "        self.step += 1\n        self.samples = self.end",
        "        self.step += 2\n        self.samples = self.end",
        COUNT,
    ),
    Mutation(
        "keep what was trained as out",
        "        self.size = 0\n        self.return_all()\n",
        "        self.size = 0\n",
        COUNT,
    ),
    Mutation(
        "train what was not taken",
        "        if self.reads and len(self.out) <= self.used:\n",
        "        if False:\n",
        COUNT,
    ),
    Mutation(
        "make a step of some of its micro-batches",
        "        if not self.is_whole:\n            return self._incomplete(made, is_none=not self.out)\n",
        "",
        COUNT,
    ),
    Mutation(
        "make a step that the model has not seen", "if (unseen := list(unseen)) else None", "if False else None", COUNT
    ),
    Mutation(
        "go on after a refusal",
        "        if self.failure is not None:\n            raise self.failure\n\n    def check_more",
        "        return\n\n    def check_more",
        COUNT,
    ),
    Mutation(
        "save what was refused",
        "        if self.failure is not None and not self._may_save:\n",
        "        if False:\n",
        COUNT,
    ),
    Mutation(
        "save within a step",
        "        if self.used:\n            headline",
        "        if False:\n            headline",
        COUNT,
    ),
    Mutation(
        "begin again with some out",
        '        if self.out:\n            raise self._refuse(self.untrained("a new `for` begins"))\n',
        "",
        COUNT,
    ),
    Mutation(
        "take the trainer's word for its steps",
        "        if step == self.step and samples in (None, self.samples):\n",
        "        if True:\n",
        COUNT,
    ),
    Mutation(
        "compare steps and no samples",
        "        if step == self.step and samples in (None, self.samples):\n",
        "        if step == self.step:\n",
        COUNT,
    ),
    Mutation(
        "let a counter pass what was taken",
        "        if samples > self.end:\n            raise self.fail(self._incomplete())\n",
        "",
        COUNT,
    ),
    Mutation(
        "let a counter stay behind what was taken",
        "        if ahead is not None and self.end - samples not in ahead:\n",
        "        if False:\n",
        COUNT,
    ),
)

THE_FROZEN = (
    Mutation(
        "compare frozen weights never",
        "self._frozen = loaded.envelope.frozen if self.compare_frozen else None",
        "self._frozen = None",
        FROZEN_SUMS,
    ),
    Mutation(
        "count rank 0's frozen weights alone", "*(other.get(kind, (0, None))[1] for other in others)]", "]", FROZEN_SUMS
    ),
    Mutation(
        "keep the sums of frozen weights that have changed",
        "self._known[:2] != (names, glance)",
        "self._known[0] != names",
        FROZEN_SUMS,
    ),
    Mutation(
        "record no frozen weights of a loop",
        "save, lambda _: entries(models)",
        "save, lambda weights: weights",
        FROZEN,
    ),
    Mutation(
        "record no frozen weights of an engine",
        "    if excludes:\n        return there - frozen\n",
        "",
        FROZEN,
    ),
    Mutation(
        "sum up frozen weights that are saved",
        "for name, one in weights.items() if id(one) not in there}",
        "for name, one in weights.items()}",
        FROZEN,
    ),
    Mutation(
        "leave out trained weights of a loop",
        "lambda _: entries(models), self._optimizers,",
        "lambda _: entries(models), (),",
        FROZEN,
    ),
    Mutation(
        "refuse frozen weights that may have another name",
        "if names.issubset(weights) and not may_be_elsewhere():",
        "if not may_be_elsewhere():",
        FROZEN_SUMS,
    ),
    Mutation(
        "warn of weights that change and are saved elsewhere",
        "(kinds := self._changed_since(before)) and not may_be():",
        "(kinds := self._changed_since(before)):",
        FROZEN_SUMS,
    ),
    Mutation(
        "let DDP miss the weights that a model leaves out",
        "full_state_dict=full, strict=is_whole)",
        "full_state_dict=full)",
        FROZEN,
    ),
    Mutation(
        "let PEFT leave out frozen weights that are trained",
        "            check_adapter(self.trainer, save.tag_dir)\n",
        "",
        FROZEN_SUMS,
    ),
)

SEEDED = (*CHECKPOINT, *SESSION, *THE_COUNT, *THE_FROZEN)
