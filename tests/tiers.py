"""Which of three tiers a test belongs to, and that tests of the quickest one start no process.

    make check      tests without a mark
    make test       those, and tests marked `process`
    make test-all   all: also those marked `release`

A test is marked `process` by itself or its file, by its folder (`FOLDERS`), or by a fixture that starts processes
(`FIXTURES`). A test without the mark that starts a process fails, whoever runs it.
"""

from __future__ import annotations

import multiprocessing.util
import sys
from collections.abc import Iterator
from typing import Any

import pytest

#: folders in which every test starts processes.
FOLDERS = ("runs/newest", "cluster/launch", "reliability", "upstream")
#: fixtures that start processes; a test that uses one, also through another fixture, need not be marked.
FIXTURES = frozenset({"launch", "mini", "runs", "cluster", "core_wheel", "shellcheck", "energon_dataset"})
#: what the interpreter reports of a new process; `multiprocessing` has a way of its own, see `_watch`.
#: `fc-list` is matplotlib's, when it draws for the first time on a machine.
EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.spawn"})

#: id of the running test, when it may start no process.
_quick: str | None = None
#: what it has started.
_started: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by folder and fixture; tests with processes run first, since they take longest and end a run late."""
    folders = tuple(f"tests/{folder}/" for folder in FOLDERS)
    for item in items:
        if item.nodeid.startswith(folders) or FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("process")
    first = {item.path for item in items if item.get_closest_marker("process")}
    items.sort(key=lambda item: item.path not in first)


def _note(event: str, what: object) -> None:
    if _quick is not None:
        _started.append(f"{event}: {what}")
        pytest.fail(_words())


def _words() -> str:
    return (
        f"a test of `make check` starts a process ({_started[0]}).\n"
        "Mark it `@pytest.mark.process`, so that it runs in `make test`, or do without; see CONTRIBUTING.md"
    )


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        if args[1][0] != "fc-list":
            _note(event, args[1])
    elif event in EVENTS:
        _note(event, args)


def _watch() -> None:
    sys.addaudithook(_hook)
    spawn = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]

    def watched(path: Any, args: Any, passfds: Any) -> Any:
        _note("multiprocessing", args[-1])
        return spawn(path, args, passfds)

    multiprocessing.util.spawnv_passfds = watched  # type: ignore[attr-defined]


_watch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Watch the tests without the mark, their fixtures included."""
    global _quick
    marked = any(item.get_closest_marker(name) for name in ("process", "release"))
    _started.clear()
    _quick = None if marked else item.nodeid
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """Fail also if the code under test has swallowed the failure; what a session's fixture stops here, it may start."""
    global _quick
    _quick = None
    if _started:
        pytest.fail(_words())
