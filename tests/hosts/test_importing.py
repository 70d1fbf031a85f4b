"""Post-import hooks and wrappers: when they run, what they leave alone, and how they live with other patchers."""

from __future__ import annotations

import functools
import importlib
import inspect
import pickle
import sys
import threading
import types
import zipfile

import pytest

from megaresume.hosts import importing
from megaresume.hosts.importing import reaches, when_imported, wrap


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A directory on sys.path; what is imported from it, and what waits for it, is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before, waiting = set(sys.modules), dict(importing._callbacks)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]
    importing._callbacks.clear()
    importing._callbacks.update(waiting)


def louder(original):
    @functools.wraps(original)
    def louder_wrapper(*args):
        return [*original(*args), "louder"]

    return louder_wrapper


def test_runs_after_the_import_and_before_anybody_binds_a_name(home):
    (home / "pkg_a.py").write_text("def f(): return ['f']\n")
    (home / "pkg_b.py").write_text("from pkg_a import f\n")
    when_imported("pkg_a", lambda module: wrap(module, "f", louder))
    assert "pkg_a" not in sys.modules
    assert importlib.import_module("pkg_b").f() == ["f", "louder"]


def test_at_once_when_it_is_imported_and_once_for_one_function(home):
    (home / "pkg_c.py").write_text("x = 1\n")
    module, seen = importlib.import_module("pkg_c"), []
    when_imported("pkg_c", seen.append)
    when_imported("pkg_c", seen.append)
    assert seen == [module]


def test_a_hook_may_register_another_one(home):
    (home / "pkg_d.py").write_text("")
    seen = []
    when_imported("pkg_d", lambda module: when_imported("pkg_d", lambda module: seen.append(module.__name__)))
    importlib.import_module("pkg_d")
    assert seen == ["pkg_d"]


def test_a_reload_is_an_import(home):
    (home / "pkg_e.py").write_text("def f(): return ['f']\n")
    when_imported("pkg_e", lambda module: wrap(module, "f", louder))
    module = importlib.import_module("pkg_e")
    importlib.reload(module)
    assert module.f() == ["f", "louder"]


def test_an_error_of_a_hook_is_the_error_of_the_import(home):
    (home / "pkg_g.py").write_text("")

    def refuse(module):
        raise LookupError("no seam")

    when_imported("pkg_g", refuse)
    with pytest.raises(LookupError, match="no seam"):
        importlib.import_module("pkg_g")
    assert "pkg_g" not in sys.modules  # nobody gets it half hooked


def test_the_loader_stays_what_it_was(home):
    package = home / "pkg_h"
    package.mkdir()
    (package / "__init__.py").write_text("def f():\n    return 'source'\n")
    (package / "data.txt").write_text("resource")
    when_imported("pkg_h", lambda module: None)
    module = importlib.import_module("pkg_h")
    assert type(module.__loader__) is importlib.machinery.SourceFileLoader
    assert module.__loader__.is_package("pkg_h") and "'source'" in module.__loader__.get_source("pkg_h")
    assert "return 'source'" in inspect.getsource(module.f)
    assert importlib.resources.files("pkg_h").joinpath("data.txt").read_text() == "resource"


def test_modules_of_one_loader_are_told_apart(home, monkeypatch):
    with zipfile.ZipFile(home / "two.zip", "w") as archive:
        archive.writestr("zipped_a.py", "def f(): return ['a']\n")
        archive.writestr("zipped_b.py", "def f(): return ['b']\n")
    monkeypatch.syspath_prepend(str(home / "two.zip"))
    when_imported("zipped_a", lambda module: wrap(module, "f", louder))
    assert importlib.import_module("zipped_a").f() == ["a", "louder"]
    loader = sys.modules["zipped_a"].__spec__.loader
    spec = importlib.util.spec_from_loader("zipped_b", loader)  # a finder may keep one loader for all its modules
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    assert module.f() == ["b"]


def test_once_however_many_threads_import(home):
    (home / "pkg_i.py").write_text("import time\ntime.sleep(0.05)\ndef f(): return ['f']\n")
    seen, results = [], []
    when_imported("pkg_i", lambda module: (seen.append(module), wrap(module, "f", louder)))
    threads = [threading.Thread(target=lambda: results.append(importlib.import_module("pkg_i").f())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [["f", "louder"]] * 8 and len(seen) == 1


def test_registering_while_another_thread_imports(home):
    (home / "pkg_j.py").write_text(
        "import threading\nstarted, go = threading.Event(), threading.Event()\n"
        "import pkg_j_gate\npkg_j_gate.started.set()\npkg_j_gate.go.wait(10)\ndef f(): return ['f']\n"
    )
    gate = types.ModuleType("pkg_j_gate")
    gate.started, gate.go = threading.Event(), threading.Event()
    sys.modules["pkg_j_gate"] = gate
    importer = threading.Thread(target=importlib.import_module, args=("pkg_j",))
    importer.start()
    assert gate.started.wait(10)
    threading.Timer(0.1, gate.go.set).start()
    when_imported("pkg_j", lambda module: wrap(module, "f", louder))
    importer.join()
    assert sys.modules["pkg_j"].f() == ["f", "louder"]


def module_with(name, **names):
    module = types.ModuleType(name)
    module.__dict__.update(names)
    sys.modules[name] = module
    return module


def fresh():
    """A function that no module holds: patchers would rebind it here as well."""

    def plain():
        """Words."""
        return ["f"]

    return plain


def test_wrapping_twice_changes_nothing(home):
    plain = fresh()
    module = module_with("patched", f=plain)
    assert wrap(module, "f", louder) and not wrap(module, "f", louder)
    assert module.f() == ["f", "louder"]
    assert (module.f.__name__, module.f.__doc__, module.f.__wrapped__) == ("plain", "Words.", plain)


def test_names_imported_before_are_rebound(home, monkeypatch):
    plain = fresh()
    module = module_with("patched", f=plain)
    fork, script = module_with("mindspeed_llm.training", own=plain), sys.modules["__main__"]
    monkeypatch.setattr(script, "imported_by_name", plain, raising=False)
    wrap(module, "f", louder)
    assert fork.own() == script.imported_by_name() == ["f", "louder"]


def test_a_function_that_nobody_else_has_is_not_looked_for(home, monkeypatch):
    (home / "pkg_k.py").write_text("def f(): return ['f']\ndef g(): return ['g']\n")
    searched = []
    monkeypatch.setattr(importing, "_rebind", lambda old, new: searched.append(old.__name__))
    module = importlib.import_module("pkg_k")
    fork = module_with("fork", g=module.g)
    assert wrap(module, "f", louder) and wrap(module, "g", louder)
    assert searched == ["g"] and fork.g() == ["g"]


def test_methods(home):
    class Engine:
        def save(self, tag):
            return [tag]

    class Pipeline(Engine):
        pass

    engine = Pipeline()
    assert wrap(Engine, "save", louder) and not wrap(Engine, "save", louder)
    assert engine.save("x") == ["x", "louder"]


class Adaptor:
    """What MindSpeed's patch manager does: set the attribute, then replace the old object in all of sys.modules."""

    @staticmethod
    def patch(module, name, patch):
        old = getattr(module, name)
        new = patch(old) if patch.__name__.endswith(("wrapper", "decorator")) else patch
        setattr(module, name, new)
        for other in list(sys.modules.values()):
            for key, value in list(getattr(other, "__dict__", {}).items()):
                if id(value) == id(old):
                    setattr(other, key, new)


def adaptor_wrapper(original):
    def no_wraps(*args):  # not all of them use functools.wraps
        return [*original(*args), "adaptor"]

    return no_wraps


def replacement():
    return ["replaced"]


@pytest.mark.parametrize("adaptor_first", [True, False])
def test_wrappers_of_others_chain(home, adaptor_first):
    plain = fresh()
    module = module_with("patched", f=plain)
    user = module_with("user", f=plain)
    for turn in (adaptor_first, not adaptor_first):
        if turn:
            Adaptor.patch(module, "f", adaptor_wrapper)
        else:
            wrap(module, "f", louder)
    order = ["f", "adaptor", "louder"] if adaptor_first else ["f", "louder", "adaptor"]
    assert module.f() == user.f() == order
    assert reaches(module.f, louder)
    assert not wrap(module, "f", louder)  # found behind a wrapper that has no __wrapped__
    assert module.f() == order


def test_a_replacement_is_noticed_and_can_be_wrapped(home):
    module = module_with("patched", f=fresh())
    wrap(module, "f", louder)
    Adaptor.patch(module, "f", replacement)
    assert not reaches(module.f, louder)
    assert wrap(module, "f", louder)
    assert module.f() == ["replaced", "louder"]


_kept = holder = None


def calls_a_global():
    return [*_kept(), "other"]


def calls_through_a_module():
    return [*holder.kept(), "other"]


class Callable_:
    def __init__(self, function):
        self.function = function

    def __call__(self):
        return [*self.function(), "other"]

    def method(self):
        return [*self.function(), "other"]


@pytest.mark.parametrize(
    "around",
    [
        lambda f: functools.partial(lambda g: [*g(), "other"], f),
        lambda f: lambda g=f: [*g(), "other"],
        lambda f: Callable_(f),
        lambda f: functools.lru_cache(lambda: [*f(), "other"]),
        lambda f: calls_a_global,
        lambda f: calls_through_a_module,
    ],
    ids=["partial", "default", "object", "lru_cache", "global", "module"],
)
def test_found_in_every_kind_of_wrapper(home, monkeypatch, around):
    module = module_with("patched", f=fresh())
    wrap(module, "f", louder)
    monkeypatch.setitem(globals(), "_kept", module.f)
    monkeypatch.setitem(globals(), "holder", module_with("holder", kept=module.f))
    module.f = around(module.f)
    assert module.f() == ["f", "louder", "other"]
    assert reaches(module.f, louder)
    assert not reaches(around(fresh()), adaptor_wrapper)


def test_a_wrapped_function_can_be_pickled(home):
    (home / "pkg_k.py").write_text("def f(): return ['f']\n")
    when_imported("pkg_k", lambda module: wrap(module, "f", louder))
    module = importlib.import_module("pkg_k")
    assert pickle.loads(pickle.dumps(module.f)) is module.f


def test_lazy_modules_sleep_on(home):
    class Lazy(types.ModuleType):
        def __getattribute__(self, name):
            raise AssertionError("woken")

    sys.modules["sleeper"] = Lazy("sleeper")
    wrap(module_with("patched", f=fresh()), "f", louder)


def test_what_only_says_that_it_is_a_module_is_passed_over(home):
    """The libraries of cffi lie in sys.modules, claim to be modules, and have no __dict__."""

    class Library:
        __slots__ = ()
        __class__ = types.ModuleType

    assert isinstance(Library(), types.ModuleType)
    (home / "pkg_library.py").write_text("def f(): return ['f']\n")
    sys.modules["pkg_library_lib"] = Library()
    module = importlib.import_module("pkg_library")
    assert wrap(module, "f", louder) and module.f() == ["f", "louder"]
