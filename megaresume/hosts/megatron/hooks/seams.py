"""The names in Megatron that we wrap: what, where, why, and what it means when one is missing.

All of them are looked up when they are called, as globals of the module that is named here or by name from there, and
have kept their names and their place since core 0.8. ``docs/launcher.md`` shows this table.
"""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megaresume.hosts.importing import reaches, wrap
from megaresume.hosts.megatron.project import Kind, Project, current_project
from megaresume.stream.errors import SetupError

_LM: tuple[Kind, ...] = ("megatron-lm",)
_DEEPSPEED: tuple[Kind, ...] = ("megatron-deepspeed", "bigscience")
_ALL: tuple[Kind, ...] = (*_LM, *_DEEPSPEED)
_READ_METADATA: tuple[Kind, ...] = ("megatron-lm", "megatron-deepspeed")

_HOME = "megaresume.hosts.megatron"

#: factories that `megaresume.hosts.megatron.hooks.calls` asks for: which of them this process has come through.
ITERATORS, SAVE = "data.iterators.around_build_data_iterators", "checkpointing.around_save_checkpoint"
LOAD, SIGNALS = "checkpointing.around_load_checkpoint", "host.around_signals_received"

#: paths of the factories whose wrappers were called in this process.
called: set[str] = set()


@dataclass(frozen=True, slots=True)
class Factory:
    """``around_x(original) -> replacement``, imported when it is first needed. Equal by name."""

    #: dotted name below this package.
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

    #: key of `Project.modules`.
    role: str
    #: a function of that module, or ``Class.method``.
    name: str
    factory: Factory
    kinds: tuple[Kind, ...]
    #: one sentence for the document and for the error.
    why: str
    #: whether a training without it would be a silent failure.
    required: bool = True
    #: whether another patcher may put something else in its place: what it does is done elsewhere as well.
    replaceable: bool = False
    #: roles of the modules that import it by name and call it from there.
    used_by: tuple[str, ...] = ()

    def owner(self, module: ModuleType) -> Any:
        """The module, or the class in it; None if there is no such class."""
        class_name, _, _ = self.name.rpartition(".")
        return getattr(module, class_name, None) if class_name else module

    def apply(self, module: ModuleType, role: str, project: Project) -> None:
        """Wrap the name in a module that is imported: in its home, and where somebody put another one in its place.

        Raises:
            SetupError: the name is not at home, and it is required.
        """
        owner, attribute = self.owner(module), self.name.rpartition(".")[2]
        there = callable(getattr(owner, attribute, None))
        if there and role in (self.role, *self.used_by):
            wrap(owner, attribute, self.factory)
        elif self.required and role == self.role:
            raise self.missing(module, project)

    def missing(self, module: ModuleType, project: Project) -> SetupError:
        """The error for a name that is not there."""
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
        """The error for a wrapper that another patcher has put aside."""
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
        """Whether a call of the name in this module still comes to our wrapper; True if it has no such name."""
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
        factory=Factory("tracker.around_read_metadata"),
        kinds=_READ_METADATA,
        why="reads the tracker: an empty one means the newest complete checkpoint",
    ),
    Seam(
        role="training",
        name="build_train_valid_test_data_iterators",
        factory=Factory("data.iterators.around_build_data_iterators"),
        kinds=_ALL,
        why="builds the data after the checkpoint was loaded: here the stream, or the guard of Megatron's own datasets",
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
            factory=Factory("hooks.calls.around_forward_backward"),
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
        factory=Factory("engine.around_engine_save"),
        kinds=_DEEPSPEED,
        why="writes every checkpoint of Megatron-DeepSpeed: the data state goes into its client state",
    ),
    Seam(
        role="engine",
        name="DeepSpeedEngine.load_checkpoint",
        factory=Factory("engine.around_engine_load"),
        kinds=_DEEPSPEED,
        why="reads every checkpoint of Megatron-DeepSpeed, by DeepSpeed's own pointer",
    ),
)


def seams_of(project: Project) -> list[Seam]:
    """The names to wrap in this project.

    Raises:
        SetupError: a required one belongs to a module that the project does not have.
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
    """Make sure that a call of each name still comes to our wrapper, wherever Megatron calls it from.

    Raises:
        SetupError: another patcher replaced a function that we had wrapped, or a module was never seen.
    """
    project = current_project()
    for seam in seams_of(project):
        for role in (seam.role, *seam.used_by):
            module = sys.modules.get(project.modules.get(role, ""))
            if module is not None and not seam.replaceable and not seam.is_reached_from(module):
                raise seam.lost(module)
