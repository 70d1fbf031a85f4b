"""`compiled`: how functions of this package are compiled by numba and cached for the next process.

numba's own cache crashes the program if no directory is writable or a cache file is truncated; and it takes a cached
function as current if its own file is unchanged, even if a function that it calls has changed. Here

    no directory       use the user's temporary directory; failing that, do not cache, and log what that costs
    a damaged file     compile and write again
    another release    compile again if any module of `megaresume.stream` with compiled functions has changed
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
#: the key of numba's runtime in its cache, in place of a function's signature.
_RUNTIME = "runtime"
#: the reason already logged, so that it is logged once.
_said: list[str] = []


def compiled(*signatures: Any, **options: Any) -> Any:
    """A decorator like ``numba.njit(nogil=True, cache=True, ...)``; the parentheses may be left out.

    Args:
        signatures: compile for these types only, immediately.
        options: of ``numba.njit``.
    """
    if len(signatures) == 1 and callable(signatures[0]) and not options and hasattr(signatures[0], "__code__"):
        return _decorate(signatures[0], (), {})
    return lambda function: _decorate(function, signatures, options)


def _decorate(function: Callable[..., Any], signatures: tuple[Any, ...], options: dict[str, Any]) -> Any:
    dispatcher = numba.njit(nogil=True, **options)(function)
    dispatcher._cache = _WhenUsed(function)
    # Numba looks for extensions in the metadata of all installed packages, which only compiling needs.
    dispatcher._compilation_chain_init_hook = _nothing
    for signature in signatures:
        dispatcher.compile(signature)
    if signatures:
        dispatcher.disable_compile()
    return dispatcher


def _nothing() -> None:
    """Do nothing, for numba to call."""


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
    """A hash of all source files with compiled functions; the cache is valid only for the same hash."""
    hasher = xxhash.xxh3_128()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        content = path.read_bytes()
        if b"import compiled" in content or b"import intrinsic" in content:
            hasher.update(content)
    return hasher.hexdigest()


class _OfUser(caching.UserProvidedCacheLocator):
    """A directory below the temporary one that only this user can write to, since code is loaded from it."""

    def __init__(self, function: Any, file: str) -> None:
        self._py_file, self._lineno = file, function.__code__.co_firstlineno
        self._own = os.path.join(tempfile.gettempdir(), f"megaresume-{os.getuid()}")
        self._cache_path = os.path.join(self._own, self.get_suitable_cache_subpath(file))

    @classmethod
    def from_function(cls, function: Any, file: str) -> Any:
        """The locator for a function's cache; None if there is no usable cache directory of this user."""
        try:
            self = cls(function, file)
            self.ensure_cache_path()
        except OSError:
            return None
        return self

    def ensure_cache_path(self) -> None:
        """Create the cache directory.

        Raises:
            OSError: it is not writable, or belongs to another user.
        """
        os.makedirs(self._own, mode=0o700, exist_ok=True)
        found = os.lstat(self._own)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(f"{self._own} is not of this user alone")
        super().ensure_cache_path()


class _Library(JITCodeLibrary):
    """Cached machine code. Its bitcode, needed only to compile other functions, is parsed on demand."""

    _bitcode: bytes

    @classmethod
    def kept(cls, library: Any) -> Any:
        """The parts of a compiled library that go into the cache."""
        name, _, code = library.serialize_using_object_code()
        module = library._get_module_for_linking()
        both = chain(module.functions, module.global_variables)
        return name, code, [one.name for one in both if not one.is_declaration]

    @classmethod
    def loaded(cls, codegen: Any, kept: Any) -> _Library:
        """Rebuild the library, as numba's ``_unserialize`` does."""
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
        """The parts of a compiled function that are cached, with its library in the form of `_Library`."""
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
    """Cache files: an index that may be damaged, and data preceded by a hash."""

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
    """Unpickles compiled code without importing the modules that its functions come from (half of numba, and scipy if
    it is installed)."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numba.core.environment", "_rebuild_env"):
            return _environment
        return super().find_class(module, name)


def _environment(module: str, constants: list[Any], name: str) -> Environment:
    """The environment of a compiled function: its constants. Its module's names are needed only by code that runs in
    the interpreter, which we do not have."""
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

        Numba would first prepare its context for compiling, which doubles the imports. Loading code needs only its
        memory manager; compiling prepares the rest.
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
        """Write a compiled function to the cache, unless the disk is full."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _say(f"compiled code cannot be kept: {error}")


class _WhenUsed:
    """A function's cache, made at the first call: numba tests whether files can be written, in every process and for
    every function."""

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
    """Set up numba's memory manager from the cache; numba itself compiles it in every process."""
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
    """Numba's runtime from the cache, or else compiled: replaces its ``compile_nrt_functions``."""
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
