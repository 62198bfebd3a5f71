"""Run a recorded list of kernels from compiled code: between two kernels there is no Python."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic

_INT, _VOID = ir.IntType(64), ir.VoidType()
_BYTES = ir.IntType(8).as_pointer()

# Fields of one recorded launch. No threads: skip it; one: call it here; more: a parallel region.
T_KERNEL, T_BLOCK, T_THREADS = range(3)
TAPE_FIELDS = T_THREADS + 1


@intrinsic
def _call(typingctx, kernel, block):
    """``kernel(block)``, both addresses."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_VOID, [_BYTES])
        function = builder.inttoptr(args[0], kind.as_pointer())
        builder.call(function, [builder.inttoptr(args[1], _BYTES)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _call_parallel(typingctx, parallel, kernel, block, threads):
    """``GOMP_parallel(kernel, block, threads, 0)``; the first three are addresses."""

    def codegen(context, builder, signature, args):
        count = ir.IntType(32)
        kind = ir.FunctionType(_VOID, [_BYTES, _BYTES, count, count])
        function = builder.inttoptr(args[0], kind.as_pointer())
        fn, data = (builder.inttoptr(arg, _BYTES) for arg in args[1:3])
        builder.call(function, [fn, data, builder.trunc(args[3], count), ir.Constant(count, 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


def build_tape(cache: bool, stamp: int) -> Any:
    """Argument block: number of launches, address of ``GOMP_parallel``, ``stamp``, then TAPE_FIELDS per launch."""

    def tape(args):
        launches, parallel = args[0], args[1]
        for launch in range(launches):
            at = 3 + launch * TAPE_FIELDS
            threads = args[at + T_THREADS]
            if threads == 1:
                _call(args[at + T_KERNEL], args[at + T_BLOCK])
            elif threads > 1:
                _call_parallel(parallel, args[at + T_KERNEL], args[at + T_BLOCK], threads)
        args[2] = stamp

    return cfunc(types.void(types.CPointer(types.int64)), cache=cache, nopython=True)(tape)
