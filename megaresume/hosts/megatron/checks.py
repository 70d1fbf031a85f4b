"""Errors where stock Megatron is silent: flags and checkpoints that would quietly change what is trained.

arguments       `around_validate_args`, `check_flags`: flags that no run of ours can have
before a load   `before_load`: a missing tracker (`megaresume.hosts.megatron.load_rules`)
after it        `after_load`: compare with the arguments in the checkpoint; `after_restore`: with its data state
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megaresume.checkpoint.load.search import Choice, ForeignCheckpoint
from megaresume.checkpoint.ranks import is_rank_0, on_all_ranks
from megaresume.checkpoint.records.envelope import Envelope
from megaresume.checkpoint.records.step_file import StepFile
from megaresume.hosts.megatron.arguments import Settings, data_parallel_size, ignores_rampup
from megaresume.hosts.megatron.host import MegatronHost, can_be_written, switch_on
from megaresume.hosts.megatron.load_rules import BEGIN_ANEW, check_tracker, mend_tracker, newer_copy
from megaresume.hosts.megatron.project import Project, current_project, parse_version
from megaresume.stream.errors import CheckpointError, UsageError

#: name on args -> (flag, why a stream cannot provide it, what to do instead).
_NO_STREAM = {
    "repeated_dataloader": (
        "--repeated-dataloader",
        "its sampler begins every pass where the resume began; the stream repeats its sources itself",
        "leave the flag out; max_epochs in data.yaml says how often a source comes",
    ),
    "mock_data": ("--mock-data", "mock data has no documents", "remove it, or pass --megaresume-mode guard"),
    "fim_data": (
        "--fim-data",
        "it permutes documents with a random generator of each worker process, which nothing can resume",
        "remove it, and apply fill-in-the-middle when the corpus is prepared; or pass --megaresume-mode guard",
    ),
    "perform_rl_step": (
        "--perform-rl-step",
        "reinforcement learning makes its own samples and builds no data loader",
        "pass --megaresume-mode off",
    ),
    "full_validation": (
        "--full-validation",
        "the validation stream has no end that could be reached",
        "set --eval-iters instead, or pass --megaresume-mode guard",
    ),
    "multiple_validation_sets": (
        "--multiple-validation-sets",
        "the validation sources are blended into one stream",
        "remove it, or pass --megaresume-mode guard",
    ),
    "hybrid_context_parallel": (
        "--hybrid-context-parallel",
        "its scheduler takes single sequences of different lengths, a stream gives samples of one length",
        "remove it, or pass --megaresume-mode guard",
    ),
    "train_data_exact_num_epochs": (
        "--train-data-exact-num-epochs",
        "a stream has no index of a fixed number of epochs",
        "remove it; in data.yaml, give each source max_epochs",
    ),
    "train_weighted_split_paths": (
        "--train-weighted-split-paths",
        "ranges of documents by START:END are not read",
        "write the blend into a data.yaml with a split for each source, and pass --megaresume-data",
    ),
    "valid_weighted_split_paths": (
        "--valid-weighted-split-paths",
        "several validation groups are not supported",
        "write the blend into a data.yaml with a split for each source, and pass --megaresume-data",
    ),
    **dict.fromkeys(
        ("data_efficiency_curriculum_learning", "curriculum_learning_legacy", "curriculum_learning"),
        (
            "DeepSpeed's curriculum",
            "it chooses or cuts the samples by itself: neither they nor their order would be those of the stream",
            "switch the curriculum off in the DeepSpeed config, or --megaresume-mode guard",
        ),
    ),
}


def around_validate_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook on Megatron's ``validate_args(args, ...)`` that adds our own checks. Every rank has the same command line.

    Raises:
        UsageError: a flag that is incompatible with exact resume.
    """

    def validate_args(args: Any, *more: Any, **kwargs: Any) -> Any:
        result = original(args, *more, **kwargs)
        final = result if result is not None else args
        settings = Settings.from_args(final)
        check_flags(final, settings, current_project())
        switch_on(final, settings, current_project())
        return result

    return validate_args


def check_flags(args: Any, settings: Settings, project: Project) -> None:
    """Refuse flags under which a run cannot be resumed exactly.

    Raises:
        UsageError: names the flag and what to pass instead.
    """
    if settings.mode == "off":
        return
    if getattr(args, "rampup_batch_size", None) and ignores_rampup(args, project):
        words = " ".join(map(str, args.rampup_batch_size))
        raise UsageError(
            "this Megatron ignores --rampup-batch-size",
            found=f"--rampup-batch-size {words}, megatron-core {project.version}",
            expected="no such flag: since 0.18 every step is trained with the final global batch size",
            cause="Megatron was upgraded; it parses the flag still",
            action='--step-batch-size-schedule "0:SIZE TOKENS:SIZE ...", or leave the flag out',
        )
    if settings.checkpoints.stage_to is not None and not can_be_written(getattr(args, "save", None)):
        raise UsageError(
            "--megaresume-stage-to needs --save",
            found=f"--megaresume-stage-to {settings.checkpoints.stage_to}, --save {getattr(args, 'save', None)}",
            expected="the local directory that the copies are made of",
            action="--save DIRECTORY --load DIRECTORY, on a disk of this machine",
        )
    if settings.mode == "stream":
        _check_stream_flags(args)
    elif settings.skip_samples or (project.kind == "megatron-lm" and getattr(args, "skip_train_iteration_range", None)):
        flag = "--megaresume-skip-samples" if settings.skip_samples else "--skip-train-iteration-range"
        raise UsageError(
            f"{flag} needs our stream",
            found=f"{flag}, mode {settings.mode}",
            expected="mode stream: Megatron's own datasets cannot leave samples out",
            action="--iterations-to-skip, which Megatron has itself; or --megaresume-mode stream in a new run",
        )


def _check_stream_flags(args: Any) -> None:
    if getattr(args, "dataloader_type", None) == "cyclic":
        raise UsageError(
            "--dataloader-type cyclic does not train the stream in its order",
            found="--dataloader-type cyclic, mode stream",
            expected="the samples of the stream, in its order",
            cause="that sampler shuffles what it is given, in another way for every number of ranks; the stream is "
            "shuffled",
            action="--dataloader-type single, or leave the flag out",
        )
    for name, (flag, why, action) in _NO_STREAM.items():
        if getattr(args, name, None):
            raise UsageError(
                f"{flag} does not go together with a megaresume stream", found=flag, cause=why, action=action
            )


def before_load(current: MegatronHost, damaged: Mapping[Path, str]) -> tuple[Choice | None, StepFile | None]:
    """Choose the checkpoint before Megatron loads ``args.load``. Collective.

    To load another checkpoint than the one the tracker names, sets ``args.ckpt_step``.

    Args:
        current: the host.
        damaged: unreadable tag directories to pass over, with the reason.

    Returns:
        what Megatron will load, and the record beside it; None if Megatron itself chooses.

    Raises, on every rank:
        UsageError: see `check_flags`.
        CheckpointError: see `Session.choose` and `check_tracker`; or another job writes to ``--save``.
        SetupError: see `Session.start`.
    """
    # Checked again, since validate_args is not always called (YAML configs, bigscience).
    on_all_ranks(lambda: check_flags(current.args, current.settings, current.project))
    current.start()
    args, load = current.args, str(getattr(current.args, "load", None) or "")
    if current.project.kind != "megatron-lm" or not can_be_written(load):
        return None, None
    root, save = Path(os.path.abspath(load)), current.session.roots.save_dir

    def pick(copies: Path | None, damaged: Mapping[Path, str]) -> Choice | ForeignCheckpoint | None:
        if copies is not None and (copy := newer_copy(args, root, copies, damaged)) is not None:
            return copy
        found = check_tracker(args, damaged=damaged)
        if root == save and not isinstance(found, ForeignCheckpoint) and not getattr(args, "ckpt_step", None):
            mend_tracker(root, found)
        return found

    choice, beside = current.session.choose(root, pick, damaged)
    if choice is not None and current.session.roots.copies_of(root) is not None:
        current.session.roots.mark_as_own(root)  # also if it lies among the copies
    if choice is not None and (choice.rejected or choice.notes or choice.load_dir != root):  # not the one that is named
        args.ckpt_step = choice.iteration
        if is_rank_0():
            print(f"megaresume: resuming from {choice.tag}, the newest complete checkpoint", flush=True)
    return choice, beside


def after_load(current: MegatronHost, iteration: int, checkpoint_args: Any) -> None:
    """Compare the arguments in the checkpoint with this run's. On every rank.

    Raises:
        CheckpointError: the checkpoint has no arguments.
        UsageError: a changed flag that would silently change the data.
    """
    args = current.args
    if checkpoint_args is None:
        raise CheckpointError(
            "the checkpoint has no arguments, and so no count of the samples trained",
            found=f"iteration {iteration} from {args.load}, without args",
            expected="the arguments that Megatron saves in every checkpoint",
            cause="the checkpoint was converted by a tool that drops them, or saved by another program",
            action=f"load it as weights to begin with: {BEGIN_ANEW}; or keep args in the conversion",
        )
    _check_batch_size(args, checkpoint_args)
    if current.settings.mode == "guard":
        _check_cyclic(args, checkpoint_args)


def _check_batch_size(args: Any, saved: Any) -> None:
    before, now = getattr(saved, "global_batch_size", None), getattr(args, "global_batch_size", None)
    steps = getattr(args, "step_batch_size_schedule", None) or getattr(saved, "step_batch_size_schedule", None)
    if steps or not before or not now or before == now or _is_batch_size_given(args):
        return
    dp = f"{data_parallel_size(saved)} -> {data_parallel_size(args)}"
    mbs = f"{getattr(saved, 'micro_batch_size', '?')} -> {getattr(args, 'micro_batch_size', '?')}"
    raise UsageError(
        "the global batch size changed because --global-batch-size is left out",
        found=f"{now} samples a step (data-parallel size {dp}, micro-batch size {mbs})",
        expected=f"{before}, as in the checkpoint, or a size that was asked for",
        cause="without the flag it is micro-batch size times data-parallel size, and the number of ranks changed",
        action=f"--global-batch-size {before} to continue as before, or --global-batch-size {now} to change it",
    )


def _is_batch_size_given(args: Any) -> bool:
    """Whether the command line or YAML config sets the global batch size, rather than Megatron's default."""
    config = getattr(args, "yaml_cfg", None)
    if config:
        text = Path(config).read_text(encoding="utf-8", errors="replace")
        found = re.search(r"^\s*['\"]?global_batch_size['\"]?\s*:\s*([^\s#]+)", text, re.MULTILINE)
        return found is not None and found[1] not in ("null", "~", "None")
    return any(word.partition("=")[0].replace("_", "-") == "--global-batch-size" for word in sys.argv[1:])


def _check_cyclic(args: Any, saved: Any) -> None:
    before, now = getattr(saved, "dataloader_type", None), getattr(args, "dataloader_type", None)
    if "cyclic" not in (before, now):
        return
    if before is not None and before != now:
        raise UsageError(
            "the kind of sampler changed, and with it the order of all samples",
            found=f"--dataloader-type {now}",
            expected=f"--dataloader-type {before}, as in the checkpoint",
            action=f"--dataloader-type {before}",
        )

    def layout(source: Any) -> tuple[Any, ...]:
        sharding = bool(getattr(source, "data_sharding", True))
        return data_parallel_size(source), getattr(source, "micro_batch_size", None), sharding

    old, new = layout(saved), layout(args)
    if old != new:
        words = ["data-parallel size {} x micro-batch size {}, data sharding {}".format(*each) for each in (new, old)]
        raise UsageError(
            "--dataloader-type cyclic now deals out the samples in a different order",
            found=words[0],
            expected=f"{words[1]}, as in the checkpoint",
            cause="it shuffles within buckets that depend on the ranks: samples would be repeated and skipped",
            action=f"{old[0]} data-parallel ranks with --micro-batch-size {old[1]}; or start the data over: "
            f"--dataloader-type single, {BEGIN_ANEW}",
        )


def after_restore(current: MegatronHost, envelope: Envelope, checkpoint_args: Any) -> None:
    """Check the data state against the Megatron that saved it. On every rank.

    Raises:
        UsageError: ``--iterations-to-skip`` now counts from another base.
    """
    saved_by, _, version = envelope.framework.partition(" ")
    if current.settings.mode == "stream" or current.project.kind != "megatron-lm" or saved_by != "megatron-lm":
        return  # the stream itself skips, and its state knows the steps by their samples
    skipped = [int(entry) for entry in getattr(current.args, "iterations_to_skip", None) or []]
    same = skipped == [int(entry) for entry in getattr(checkpoint_args, "iterations_to_skip", None) or []]
    was_0_based, is_0_based = parse_version(version) < (0, 17), not current.project.at_least(0, 17)
    known = parse_version(version) != (0, 0) and parse_version(current.project.version) != (0, 0)
    # entries still to come: 0-based, iteration n is the one after n iterations
    ahead = [entry for entry in skipped if entry - (0 if was_0_based else 1) >= envelope.iteration]
    if not known or not same or not ahead or was_0_based == is_0_based:
        return
    translated = " ".join(str(entry + (1 if was_0_based else -1)) for entry in skipped)
    raise UsageError(
        "--iterations-to-skip means different iterations in this Megatron",
        found=f"--iterations-to-skip {' '.join(map(str, skipped))}, megatron-core {current.project.version}, which "
        f"counts from {0 if is_0_based else 1}",
        expected=f"the iterations that megatron-core {version} skips by this list: it counts from "
        f"{0 if was_0_based else 1}, and {len(ahead)} of them are still to come",
        cause="Megatron was upgraded from one side of 0.16|0.17 to the other",
        action=f"--iterations-to-skip {translated}",
    )
