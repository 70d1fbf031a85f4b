"""`compiled`: the one way in which this package has a function compiled by numba and kept for the next process.

numba's own cache ends a program where no directory can be written to, or where a file of it is cut; and it takes a
function for the same one as long as its own file is, though what it calls in another file has changed. Here

    no directory       the temporary directory of the user; else nothing is kept, and a line says what that costs
    a damaged file     compiled again, and written again
    another release    compiled again, whichever module of `megaresume.stream` with compiled functions has changed
"""

from __future__ import annotations

import functools
import io
import logging
import os
import pickle
import tempfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
import xxhash
from numba.core import caching, entrypoints
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.environment import Environment, lookup_environment
from numba.core.runtime import nrtdynmod
from numba.core.runtime.nrt import rtsys

log = logging.getLogger(__name__)
#: the key of numba's runtime in its cache, where a function would have its signature.
_RUNTIME = "runtime"
#: the reason that was given: once is enough.
_said: list[str] = []


def compiled(*signatures: Any, **options: Any) -> Any:
    """A decorator as ``numba.njit(nogil=True, cache=True, ...)``; also without brackets.

    Args:
        signatures: compile for these types at once, and for no others.
        options: of ``numba.njit``.
    """
    if len(signatures) == 1 and callable(signatures[0]) and not options and hasattr(signatures[0], "__code__"):
        return _decorate(signatures[0], (), {})
    return lambda function: _decorate(function, signatures, options)


def _decorate(function: Callable[..., Any], signatures: tuple[Any, ...], options: dict[str, Any]) -> Any:
    dispatcher = numba.njit(nogil=True, **options)(function)
    dispatcher._cache = _WhenUsed(function)
    # It looks for extensions in the metadata of all packages that are installed: only who compiles needs them.
    dispatcher._compilation_chain_init_hook = _nothing
    for signature in signatures:
        dispatcher.compile(signature)
    if signatures:
        dispatcher.disable_compile()
    return dispatcher


def _nothing() -> None:
    """Do nothing: a function for numba to call."""


def _say(why: str) -> None:
    if _said:
        return
    _said.append(why)
    log.warning(
        "megaresume: %s; every process compiles it again, about 10 s of one core at each start. Set NUMBA_CACHE_DIR to "
        "a directory that can be written to",
        why,
    )


@functools.lru_cache(maxsize=1)
def _sources() -> str:
    """A hash of all code that compiled functions may call: they are kept with what it was when they were compiled."""
    hasher = xxhash.xxh3_128()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        content = path.read_bytes()
        if b"import compiled" in content or b"import intrinsic" in content:
            hasher.update(content)
    return hasher.hexdigest()


class _OfUser(caching.UserProvidedCacheLocator):
    """A directory of this user alone below the temporary one: code is loaded from it."""

    def __init__(self, function: Any, file: str) -> None:
        self._py_file, self._lineno = file, function.__code__.co_firstlineno
        self._own = os.path.join(tempfile.gettempdir(), f"megaresume-{os.getuid()}")
        self._cache_path = os.path.join(self._own, self.get_suitable_cache_subpath(file))

    @classmethod
    def from_function(cls, function: Any, file: str) -> Any:
        """The locator for a function's cache; None if no cache directory of this user can be used."""
        try:
            self = cls(function, file)
            self.ensure_cache_path()
        except OSError:
            return None
        return self

    def ensure_cache_path(self) -> None:
        """Create the cache directory.

        Raises:
            OSError: it cannot be written to, or is another user's.
        """
        os.makedirs(self._own, mode=0o700, exist_ok=True)
        found = os.lstat(self._own)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(f"{self._own} is not of this user alone")
        super().ensure_cache_path()


class _Library(JITCodeLibrary):
    """Machine code that was kept. Its bitcode, of which other functions are compiled, is parsed if one is."""

    _bitcode: bytes

    @classmethod
    def kept(cls, library: Any) -> Any:
        """The parts of a compiled library that are written to the cache."""
        name, _, code = library.serialize_using_object_code()
        module = library._get_module_for_linking()
        both = chain(module.functions, module.global_variables)
        return name, code, [one.name for one in both if not one.is_declaration]

    @classmethod
    def loaded(cls, codegen: Any, kept: Any) -> _Library:
        """The library again, as numba's ``_unserialize`` makes it."""
        name, (code, bitcode), defined = kept
        self = cls(codegen, name)
        self.enable_object_caching()
        self._set_compiled_object(code)
        self._bitcode = bitcode
        self._finalize_final_module()
        codegen._engine._defined_symbols.update(defined)
        return self

    def _get_module_for_linking(self) -> Any:
        if self._shared_module is None:
            self._shared_module = llvm.parse_bitcode(self._bitcode)
        return self._shared_module


class _Implementation(caching.CompileResultCacheImpl):
    _locator_classes = [*caching.CompileResultCacheImpl._locator_classes, _OfUser]  # noqa: RUF012

    def reduce(self, compiled: Any) -> Any:
        """The parts of a compiled function that are cached, its library as `_Library` keeps it."""
        _, *rest = super().reduce(compiled)
        return (_Library.kept(compiled.library), *rest)

    def rebuild(self, target_context: Any, payload: Any) -> Any:
        """The compiled function from its cached parts, with a `_Library` for its code."""
        codegen = target_context.codegen()
        codegen.unserialize_library = lambda kept: _Library.loaded(codegen, kept)
        try:
            return super().rebuild(target_context, payload)
        finally:
            del codegen.unserialize_library


class _RuntimeImplementation(caching.CodeLibraryCacheImpl):
    _locator_classes = _Implementation._locator_classes
    _filename_prefix: Any = _RUNTIME

    def reduce(self, library: Any) -> Any:
        """The parts of numba's runtime that are cached."""
        return _Library.kept(library)

    def rebuild(self, target_context: Any, payload: Any) -> Any:
        """Numba's runtime from its cached parts, as a `_Library`."""
        return _Library.loaded(target_context.codegen(), payload)


class _Files(caching.IndexDataCacheFile):
    """An index that may be damaged, and data with a hash before it."""

    def _load_index(self) -> Any:
        try:
            return super()._load_index()
        except Exception:  # noqa: BLE001  whatever pickle makes of damaged bytes
            return {}

    def _save_data(self, name: str, data: Any) -> None:
        content = self._dump(data)
        with self._open_for_write(self._data_path(name)) as file:
            file.write(xxhash.xxh3_128_digest(content))
            file.write(content)

    def _load_data(self, name: str) -> Any:
        content = Path(self._data_path(name)).read_bytes()
        if xxhash.xxh3_128_digest(content[16:]) != content[:16]:
            raise OSError("damaged")  # which is as if it were not there
        return _Unpickler(io.BytesIO(content[16:])).load()


class _Unpickler(pickle.Unpickler):
    """Of compiled code, without an import of the modules that its functions come from: of half of numba, and of scipy
    where there is one."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numba.core.environment", "_rebuild_env"):
            return _environment
        return super().find_class(module, name)


def _environment(module: str, constants: list[Any], name: str) -> Environment:
    """The environment of a compiled function: its constants. Only code that runs in the interpreter, of which we have
    none, looks for the names of its module there."""
    kept: Environment | None = lookup_environment(name)
    if kept is None:
        kept = Environment({"__name__": module})
        kept.consts[:] = constants
        kept.env_name = name
        Environment._memo[name] = kept
    return kept


class _Cache(caching.FunctionCache):
    _impl_class: Any = _Implementation

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._cache_file = _Files(
            cache_path=self._cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=(self._impl.locator.get_source_stamp(), _sources()),
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function from the cache; None if there is none that can be used.

        Numba prepares its context for compiling first, which imports as much again. To load code, its memory manager is
        enough; who compiles prepares the rest.
        """
        try:
            _initialize_runtime(target_context)
            found = self._load_overload(sig, target_context)
        except Exception:  # noqa: BLE001  of another build of numba or LLVM
            found = None
        if found is None:
            entrypoints.init_all()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write a compiled function to the cache; where the disk is full, do not."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _say(f"compiled code cannot be kept: {error}")


class _WhenUsed:
    """The cache of a function, made when it is first called: numba tries whether files can be written there, in every
    process and for every function."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    @functools.cached_property
    def _cache(self) -> Any:
        try:
            return _Cache(self._function)
        except (RuntimeError, OSError) as error:
            _say(f"compiled code cannot be kept: {error}")
            entrypoints.init_all()
            return caching.NullCache()


class _RuntimeCache(_Cache):
    _impl_class = _RuntimeImplementation

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Numba's runtime from the cache; None if there is none that can be used."""
        try:
            return self._load_overload(sig, target_context)
        except Exception:  # noqa: BLE001  of another build of numba or LLVM
            return None


def _initialize_runtime(target_context: Any) -> None:
    """Numba's memory manager: numba compiles it in every process; here it is kept as functions are."""
    if rtsys._init:
        return
    with global_compiler_lock:
        compile_anew = nrtdynmod.compile_nrt_functions
        nrtdynmod.compile_nrt_functions = _runtime
        try:
            rtsys.initialize(target_context)
        finally:
            nrtdynmod.compile_nrt_functions = compile_anew


def _runtime(target_context: Any) -> Any:
    """Numba's runtime from the cache, or else compiled: this stands in for its ``compile_nrt_functions``."""
    try:
        cache = _RuntimeCache(_runtime)
    except (RuntimeError, OSError):
        return _compile_runtime(target_context)  # `_decorate` says why
    library = cache.load_overload(_RUNTIME, target_context)
    if library is None:
        library = _compile_runtime(target_context)
        cache.save_overload(_RUNTIME, library)
    return library


def _compile_runtime(target_context: Any) -> Any:
    module, library = nrtdynmod.create_nrt_module(target_context)
    library.enable_object_caching()
    library.add_ir_module(module)
    library.finalize()
    return library
