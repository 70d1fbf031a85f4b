"""The errors of `megaresume.hosts.megatron.hooks.calls`: which function was expected, and what is called instead."""

from __future__ import annotations

import sys
from types import FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING

from megaresume.checkpoint.paths import TRACKER
from megaresume.checkpoint.session.ranks import known_to_all
from megaresume.hosts.importing import STRANGERS, reaches
from megaresume.hosts.megatron.hooks.seams import (
    ITERATORS,
    LOAD,
    SAVE,
    SEAMS,
    SIGNALS,
    Factory,
    called,
    check_installed,
)
from megaresume.hosts.megatron.load_rules import BEGIN_ANEW
from megaresume.hosts.megatron.project import current_project, package_name
from megaresume.stream.errors import MegaresumeError, SetupError

if TYPE_CHECKING:
    from megaresume.hosts.megatron.host import MegatronHost

#: Packages whose frames are not the training loop.
_BELOW_THE_LOOP = ("torch", "deepspeed", "functools", "contextlib", "megaresume")
#: In the name of a function that does what ours should have done.
_BUILDERS = ("data_iterators", "data_loaders", "dataloaders")


def not_built(current: MegatronHost | None, what: str) -> MegaresumeError:
    """The data was not built through our hook. The same on every rank.

    Args:
        current: the host; None if Megatron's arguments were never set.
        what: is about to happen.
    """

    if current is not None:
        try:
            check_installed()
        except MegaresumeError as replaced:
            return known_to_all(replaced)
    name = seam_name(ITERATORS)
    found = f"{what}, from {_loop(sys._getframe())}; that function was not called{_others()}"
    expected = f"{name}, called before the first step: it is where the data is built or pinned"
    if current is None:
        return known_to_all(
            SetupError(
                "training begins without megaresume's hooks",
                found=found,
                expected=expected,
                cause="the script trains on megatron-core with a loop of another package (Megatron-Bridge, NeMo) or of "
                "its own, not through pretrain() of megatron.training",
                action="start it without megaresume.run; in your own loop: megaresume.attach (DeepSpeed) or "
                "megaresume.StreamLoader",
            )
        )
    return known_to_all(
        SetupError(
            "training begins, and the order of its data was never set",
            found=found,
            expected=expected,
            cause="a fork trains on a copy of that function, or replaced Megatron's arguments after it",
            action=f"let the loop call {name}; or --megaresume-mode off, which records nothing",
        )
    )


def not_loaded(iteration: int) -> MegaresumeError:
    """Training resumes from a checkpoint that our hook has not seen. The same on every rank."""
    name = seam_name(LOAD)
    return known_to_all(
        SetupError(
            f"training continues at iteration {iteration}, and no checkpoint was loaded through megaresume",
            found=f"{name} " + ("has loaded none for these arguments" if LOAD in called else "was not called"),
            expected="a load through it: it reads the state of the data in the checkpoint",
            cause="a fork loads with its own function, or replaced Megatron's arguments after the load",
            action=f"load through {name}; or --megaresume-mode off, which restores and records nothing",
        )
    )


def not_read(taken: int, trained: int) -> MegaresumeError:
    """What was built through our hook is not what is trained on.

    Args:
        taken: samples of all ranks, by what this rank took from its training iterator.
        trained: samples, by Megatron's counter.
    """
    name = seam_name(ITERATORS)
    return SetupError(
        "the data that megaresume built is not what was trained on",
        found=f"{trained} samples trained, {taken} of them taken from it; {_loop(sys._getframe())} trains on other "
        f"batches{_others()}",
        expected=f"the training iterator that {name} returns, for every step",
        cause="the loop builds its data a second time, in its own way",
        action=f"train on what {name} returns; or --megaresume-mode off",
    )


def not_trained(taken: int, trained: int) -> MegaresumeError:
    """More was taken from the data that was built through our hook than Megatron counts as trained.

    Args:
        taken: samples of all ranks, by what this rank took from its training iterator.
        trained: samples, by Megatron's counter.
    """
    return SetupError(
        "batches were taken and not trained",
        found=f"{taken} samples taken from the training iterator, {trained} counted as trained, in "
        f"{_loop(sys._getframe())}",
        expected="the micro-batches of a step, taken within it, and counted in args.consumed_train_samples after it",
        cause="the loop looks at a batch before it trains (a shape check, a warm-up), reads ahead, or counts its "
        "samples in another way",
        action="take batches in the forward pass of a step only; or --megaresume-mode off",
    )


def without_state(samples: int) -> MegaresumeError:
    """Megatron's arguments are about to be written, and the state on them is not that of their counter."""
    name = seam_name(SAVE)
    return SetupError(
        "a checkpoint is about to be written without the state of its data",
        found=f"{_loop(sys._getframe())} writes the checkpoint, and {name} was not called for it",
        expected=f"{name}, which puts the state of {samples} samples into it",
        cause="a fork saves with its own function, or moved the one that we wrap",
        action=f"save through {name}; or --megaresume-mode off. Load the checkpoint before this one: the files of this "
        "one are not complete",
    )


def saved_past_us(current: MegatronHost, tracker: str) -> MegaresumeError:
    """Megatron's tracker names a checkpoint that our hook has not saved."""
    name = seam_name(SAVE)
    return SetupError(
        "checkpoints were written without the state of their data",
        found=f"{current.args.save}/{TRACKER} says {tracker}, and {name} "
        + (f"was called for {', '.join(sorted(current.saved))} only" if current.saved else "was never called"),
        expected=f"saves through {name}",
        cause="a fork saves with its own function, or moved the one that we wrap",
        action=f"save through {name}; these checkpoints hold no data: load them with {BEGIN_ANEW}",
    )


def not_asked(current: MegatronHost) -> MegaresumeError:
    """Our stop flags were given, but the loop never checked whether to stop."""
    name = seam_name(SIGNALS)
    return SetupError(
        "nothing checked whether to stop: --megaresume-stop-file and --megaresume-stop-before-end had no effect",
        found=f"{name} was never called while samples {current.first_samples} to "
        f"{current.args.consumed_train_samples} were trained",
        expected="a question after every step",
        cause="a fork asks its signal handler in a different way",
        action=f"call {name} after every step; or leave the two flags out",
    )


def seam_name(factory: str) -> str:
    """Where Megatron has the function that this factory wraps."""
    seam = next(seam for seam in SEAMS if seam.factory.path == factory)
    try:
        home = current_project().modules[seam.role]
    except (SetupError, KeyError):
        home = f"{package_name()}.training.{seam.role}"
    return f"{home}.{seam.name}"


def _loop(frame: FrameType | None) -> str:
    """The function that trains or saves, as a person would look for it."""
    below = (*_BELOW_THE_LOOP, f"{package_name()}.core")
    while frame is not None:
        name, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        is_library = "site-packages" in file and not name.startswith(f"{package_name()}.")
        if not is_library and not any(name == one or name.startswith(f"{one}.") for one in below):
            return f"{frame.f_code.co_name} in {file}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"


def _others() -> str:
    """Functions elsewhere that do by their names what ours should have done; of the same name first."""
    ours, factory = seam_name(ITERATORS), Factory(ITERATORS)
    home, _, same = ours.rpartition(".")
    found: list[tuple[bool, str]] = []
    for name, module in list(sys.modules.items()):
        if name == home or name.partition(".")[0] in STRANGERS or not issubclass(type(module), ModuleType):
            continue
        for key, value in list(object.__getattribute__(module, "__dict__").items()):  # no lazy module is woken
            is_its_own = isinstance(value, FunctionType) and value.__module__ == name
            if is_its_own and any(words in key for words in _BUILDERS) and not reaches(value, factory):
                found.append((key != same, f"{name}.{key}"))
    return f"; the program has {', '.join(name for _, name in sorted(found)[:3])}" if found else ""
