"""`prefetch`: have memory brought into the cache while something else is computed.

The pieces ahead of a thousand sources do not fit into the cache, and which source comes next is known too late.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["prefetch"]


@intrinsic
def prefetch(_: Any, array: Any, i: Any, k: Any) -> Any:
    """Ask for the line of the cache that ``array[i, k]`` lies in; past the end of the array, nothing happens."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, number = signature.args[0], ir.IntType(32)
        values = context.make_array(kind)(context, builder, arguments[0])
        indices = [*arguments[1:], *[context.get_constant(types.intp, 0)] * (kind.ndim - 2)]
        pointer = cgutils.get_item_pointer(context, builder, kind, values, indices)  # type: ignore[no-untyped-call]
        pointer = builder.bitcast(pointer, cgutils.voidptr_t)
        returns_nothing = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], returns_nothing)
        builder.call(function, [pointer, number(0), number(3), number(1)])  # to read, soon, as data
        return context.get_dummy_value()

    return types.none(array, i, k), generate
