"""The names in Megatron that we wrap: what, where, why, and what it means if one is missing.

Megatron looks all of them up at each call, as globals of the module named here or by name from it, and they have kept
their names and places since core 0.8. ``docs/megatron-launcher.md`` shows this table.

Also the errors of `megaresume.hosts.megatron.calls`: which of these names training should have called, and what it
calls instead.
"""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import dataclass
from types import FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from megaresume.checkpoint.ranks import known_to_all
from megaresume.checkpoint.records.names import TRACKER
from megaresume.hosts.importing import names_of_modules, reaches, wrap
from megaresume.hosts.megatron.load_rules import BEGIN_ANEW
from megaresume.hosts.megatron.project import Kind, Project, current_project, package_name
from megaresume.stream.errors import MegaresumeError, SetupError

if TYPE_CHECKING:
    from megaresume.hosts.megatron.host import MegatronHost


_LM: tuple[Kind, ...] = ("megatron-lm",)
_DEEPSPEED: tuple[Kind, ...] = ("megatron-deepspeed", "bigscience")
_ALL: tuple[Kind, ...] = (*_LM, *_DEEPSPEED)
_READ_METADATA: tuple[Kind, ...] = ("megatron-lm", "megatron-deepspeed")

_HOME = "megaresume.hosts.megatron"

#: Factories that `megaresume.hosts.megatron.calls` asks about: which of them this process has called.
ITERATORS, SAVE = "iterators.around_build_data_iterators", "checkpointing.around_save_checkpoint"
LOAD, SIGNALS = "checkpointing.around_load_checkpoint", "host.around_signals_received"

#: Paths of the factories whose wrappers were called in this process.
called: set[str] = set()


@dataclass(frozen=True, slots=True)
class Factory:
    """``around_x(original) -> replacement``, imported when first needed. Equal by path."""

    #: Dotted name below this package.
    path: str

    def __call__(self, original: Any) -> Any:
        module, _, name = self.path.rpartition(".")
        replacement = getattr(importlib.import_module(f"{_HOME}.{module}"), name)(original)

        @functools.wraps(replacement)
        def noted(*args: Any, **kwargs: Any) -> Any:
            called.add(self.path)
            return replacement(*args, **kwargs)

        return noted


@dataclass(frozen=True, kw_only=True, slots=True)
class Seam:
    """One name that we wrap."""

    #: Key of `Project.modules`.
    role: str
    #: A function of that module, or ``Class.method``.
    name: str
    factory: Factory
    kinds: tuple[Kind, ...]
    #: One sentence, for the document and for the error.
    why: str
    #: Whether training without it would fail silently.
    required: bool = True
    #: Whether another patcher may replace it, as what it does is also done elsewhere.
    replaceable: bool = False
    #: Roles of the modules that import it by name and call it from there.
    used_by: tuple[str, ...] = ()

    def owner(self, module: ModuleType) -> Any:
        """The module, or the class in it; None if there is no such class."""
        class_name, _, _ = self.name.rpartition(".")
        return getattr(module, class_name, None) if class_name else module

    def apply(self, module: ModuleType, role: str, project: Project) -> None:
        """Wrap the name in an imported module: where it is defined, and in modules that import it.

        Raises:
            SetupError: it is required, and is not where it should be defined.
        """
        owner, attribute = self.owner(module), self.name.rpartition(".")[2]
        there = callable(getattr(owner, attribute, None))
        if there and role in (self.role, *self.used_by):
            wrap(owner, attribute, self.factory)
        elif self.required and role == self.role:
            raise self.missing(module, project)

    def missing(self, module: ModuleType, project: Project) -> SetupError:
        """The error for a missing name."""
        first = "core 0.8" if project.kind == "megatron-lm" else "its beginning"
        return SetupError(
            f"{module.__name__} has no {self.name}, which megaresume has to wrap: {self.why}",
            found=f"{project}; looked in {getattr(module, '__file__', None) or module.__name__}",
            expected=f"a function {self.name} there, as in every version of it since {first}",
            cause="a fork or a new version renamed or moved it" if project.version != "unknown" else "a fork",
            action=f"give the name back to {module.__name__} (an alias is enough), or train without megaresume by "
            "running the script itself",
        )

    def lost(self, module: ModuleType) -> SetupError:
        """The error for a wrapper that another patcher has replaced."""
        holder = getattr(self.owner(module), self.name.rpartition(".")[2])
        home = getattr(holder, "__module__", None) or type(holder).__module__
        name = getattr(holder, "__qualname__", None) or type(holder).__qualname__
        return SetupError(
            f"{module.__name__}.{self.name} was replaced by {home}.{name}, which does not call what was there before",
            found=f"{home}.{name}",
            expected=f"the function that megaresume wraps there: {self.why}",
            cause=f"{home.partition('.')[0]} patches Megatron too, and did so after megaresume",
            action="import megaresume.hosts.megatron as hooks; hooks.install() in the script, after the line "
            f"that imports {home.partition('.')[0]}: that wraps the replacement",
        )

    def is_reached_from(self, module: ModuleType) -> bool:
        """Whether a call of the name in this module still reaches our wrapper; True if it has no such name."""
        owner, attribute = self.owner(module), self.name.rpartition(".")[2]
        holder = getattr(owner, attribute, None)
        return holder is None or reaches(holder, self.factory)


SEAMS: tuple[Seam, ...] = (
    Seam(
        role="arguments",
        name="_add_data_args",
        factory=Factory("arguments.around_add_data_args"),
        kinds=_ALL,
        why="adds the flags --megaresume-… to Megatron's parser",
    ),
    Seam(
        role="arguments",
        name="validate_args",
        factory=Factory("checks.around_validate_args"),
        kinds=_READ_METADATA,
        used_by=("initialize",),
        why="validates the arguments: refuses what would silently change the data",
    ),
    Seam(
        role="checkpointing",
        name="load_checkpoint",
        factory=Factory("checkpointing.around_load_checkpoint"),
        kinds=_ALL,
        used_by=("training",),
        why="knows what was loaded and from where, also when nothing was",
    ),
    Seam(
        role="checkpointing",
        name="check_checkpoint_args",
        factory=Factory("checkpointing.around_check_checkpoint_args"),
        kinds=_ALL,
        why="receives the arguments in the checkpoint, which hold the data state, on every rank",
    ),
    Seam(
        role="checkpointing",
        name="save_checkpoint",
        factory=Factory("checkpointing.around_save_checkpoint"),
        kinds=_ALL,
        used_by=("training",),
        why="puts the data state into the arguments before they are saved, and the records beside the checkpoint after",
    ),
    Seam(
        role="checkpointing",
        name="schedule_async_save",
        factory=Factory("checkpointing.around_schedule_async_save"),
        kinds=_LM,
        why="adds the records of an asynchronous save to its finalizers, so that they are written when it is over",
    ),
    Seam(
        role="checkpointing",
        name="read_metadata",
        factory=Factory("load_rules.around_read_metadata"),
        kinds=_READ_METADATA,
        why="reads the tracker: an empty one means the newest complete checkpoint",
    ),
    Seam(
        role="training",
        name="build_train_valid_test_data_iterators",
        factory=Factory("iterators.around_build_data_iterators"),
        kinds=_ALL,
        why="builds the data after the checkpoint was loaded: here the stream, or the guard of Megatron's own datasets",
    ),
    Seam(
        role="training",
        name="train_step",
        factory=Factory("calls.around_train_step"),
        kinds=_LM,
        required=False,
        replaceable=True,
        why="has the loss and the gradient norm of each step, which live figures and replays are made of",
    ),
    Seam(
        role="builder",
        name="BlendedMegatronDatasetBuilder.build",
        factory=Factory("guard.build.around_builder_build"),
        kinds=_LM,
        why="builds the indexes that are the order of Megatron's own datasets: recorded, and pinned on resume",
    ),
    Seam(
        role="signals",
        name="DistributedSignalHandler.signals_received",
        factory=Factory("host.around_signals_received"),
        kinds=_READ_METADATA,
        required=False,
        why="asks all ranks at every step whether to save and exit: also for a file, the end of the job, other signals",
    ),
    *(
        Seam(
            role="schedules",
            name=f"forward_backward_{schedule}",
            factory=Factory("calls.around_forward_backward"),
            kinds=_READ_METADATA,
            required=False,
            replaceable=True,
            why="begins every training step: the data must have been built through our hook by then",
        )
        for schedule in ("no_pipelining", "pipelining_with_interleaving", "pipelining_without_interleaving")
    ),
    Seam(
        role="engine",
        name="DeepSpeedEngine.save_checkpoint",
        factory=Factory("host.around_engine_save"),
        kinds=_DEEPSPEED,
        why="writes every checkpoint of Megatron-DeepSpeed: the data state goes into its client state",
    ),
    Seam(
        role="engine",
        name="DeepSpeedEngine.load_checkpoint",
        factory=Factory("host.around_engine_load"),
        kinds=_DEEPSPEED,
        why="reads every checkpoint of Megatron-DeepSpeed, by DeepSpeed's own pointer",
    ),
)


def seams_of(project: Project) -> list[Seam]:
    """The names to wrap in this project.

    Raises:
        SetupError: a required name belongs to a module that the project does not have.
    """
    wanted = [seam for seam in SEAMS if project.kind in seam.kinds]
    for seam in wanted:
        if seam.required and seam.role not in project.modules:
            raise SetupError(
                f"there is no module with {seam.name}, which megaresume has to wrap: {seam.why}",
                found=f"{project}, with {', '.join(sorted(project.modules.values()))}",
                expected=f"the module that we call {seam.role}",
                cause="a fork moved it, or a part of the checkout is missing",
                action="compare the checkout with the release that it comes from",
            )
    return [seam for seam in wanted if seam.role in project.modules]


def check_installed() -> None:
    """Check that a call of each name still reaches our wrapper, from wherever Megatron calls it.

    Raises:
        SetupError: another patcher replaced a function that we had wrapped, or a module was never seen.
    """
    project = current_project()
    for seam in seams_of(project):
        for role in (seam.role, *seam.used_by):
            module = sys.modules.get(project.modules.get(role, ""))
            if module is not None and not seam.replaceable and not seam.is_reached_from(module):
                raise seam.lost(module)


#: Packages whose frames are not the training loop.
_BELOW_THE_LOOP = ("torch", "deepspeed", "functools", "contextlib", "megaresume")
#: Occurs in the name of a function that does what ours should have done.
_BUILDERS = ("data_iterators", "data_loaders", "dataloaders")


def not_built(current: MegatronHost | None, what: str) -> MegaresumeError:
    """The error if the data was not built through our hook. The same on every rank.

    Args:
        current: the host; None if Megatron's arguments were never set.
        what: what is about to happen.
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
    """The error if training resumes from a checkpoint that our hook has not seen. The same on every rank."""
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
    """The error for training that does not read what was built through our hook.

    Args:
        taken: samples of all ranks, judged by what this rank took from its training iterator.
        trained: samples by Megatron's counter.
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
    """The error if more was taken from the data built through our hook than Megatron counts as trained.

    Args:
        taken: samples of all ranks, judged by what this rank took from its training iterator.
        trained: samples by Megatron's counter.
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
    """The error if Megatron's arguments are about to be written with a state that does not match their counter."""
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
    """The error if Megatron's tracker names a checkpoint that our hook has not saved."""
    name = seam_name(SAVE)
    return SetupError(
        "checkpoints were written without the state of their data",
        found=f"{current.args.save}/{TRACKER} says {tracker}, and {name} "
        + (
            f"was called for {', '.join(sorted(current.proof.saved))} only"
            if current.proof.saved
            else "was never called"
        ),
        expected=f"saves through {name}",
        cause="a fork saves with its own function, or moved the one that we wrap",
        action=f"save through {name}; these checkpoints hold no data: load them with {BEGIN_ANEW}",
    )


def not_asked(current: MegatronHost) -> MegaresumeError:
    """The error if our stop flags were given, but the loop never checked whether to stop."""
    name = seam_name(SIGNALS)
    return SetupError(
        "nothing checked whether to stop: --megaresume-stop-file and --megaresume-stop-before-end had no effect",
        found=f"{name} was never called while samples {current.proof.first_samples} to "
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
    """The function that trains or saves, in a form a person can look up."""
    below = (*_BELOW_THE_LOOP, f"{package_name()}.core")
    while frame is not None:
        name, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        is_library = "site-packages" in file and not name.startswith(f"{package_name()}.")
        if not is_library and not any(name == one or name.startswith(f"{one}.") for one in below):
            return f"{frame.f_code.co_name} in {file}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"


def _others() -> str:
    """Functions elsewhere whose names suggest that they do what ours should have done; same name first."""
    ours, factory = seam_name(ITERATORS), Factory(ITERATORS)
    home, _, same = ours.rpartition(".")
    found: list[tuple[bool, str]] = []
    for name, names in names_of_modules():
        if name == home:
            continue
        for key, value in list(names.items()):
            is_its_own = isinstance(value, FunctionType) and value.__module__ == name
            if is_its_own and any(words in key for words in _BUILDERS) and not reaches(value, factory):
                found.append((key != same, f"{name}.{key}"))
    return f"; the program has {', '.join(name for _, name in sorted(found)[:3])}" if found else ""
