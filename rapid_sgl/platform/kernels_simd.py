"""Explicit SIMD for numba: a float32 vector type and the few operations that attention needs.

numba's auto-vectoriser cannot keep a tile of accumulators in registers across a loop, which is what decides
the speed of a matrix product. These intrinsics emit LLVM vector instructions, which LLVM lowers for any CPU
(AVX-512, AVX2, NEON, ...); only the width is chosen for the host.

Inside ``@njit`` code a vector is an ordinary local variable. Pointers are made from integer addresses with
``f32_ptr`` and friends and are indexed in elements.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model


def _host_width() -> int:
    """Lanes of one vector: 16 with AVX-512, 8 elsewhere (LLVM splits it where registers are narrower).

    Follows NUMBA_CPU_FEATURES, which decides what numba may emit.
    """
    features = config.CPU_FEATURES
    if features is None:
        features = llvm.get_host_cpu_features().flatten()
    return 16 if "+avx512f" in features.split(",") else 8


WIDTH = _host_width()
_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_VEC = ir.VectorType(_F32, WIDTH)
_IVEC = ir.VectorType(_I32, WIDTH)
_FAST = ("contract", "reassoc", "nsz")


class _VecType(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"f32x{WIDTH}")


vec_t = _VecType()


@register_model(_VecType)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _VEC)


def _splat(value: ir.Value, ty: ir.VectorType, builder: ir.IRBuilder) -> ir.Value:
    one = builder.insert_element(ir.Constant(ty, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(
        one, ir.Constant(ty, ir.Undefined), ir.Constant(ir.VectorType(_I32, ty.count), [0] * ty.count)
    )


def _const(value: float) -> ir.Constant:
    return ir.Constant(_VEC, [value] * WIDTH)


def _shuffle(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _call(builder: ir.IRBuilder, name: str, args: list[ir.Value]) -> ir.Value:
    kind = ir.FunctionType(_VEC, [_VEC] * len(args))
    fn = cgutils.get_or_insert_function(builder.module, kind, f"{name}.v{WIDTH}f32")
    return builder.call(fn, args)


def _pointer_maker(elem: types.Type) -> Callable[..., Any]:
    pointer_type = types.CPointer(elem)

    @intrinsic
    def make(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(pointer_type))

        return pointer_type(types.int64), codegen

    return make


f32_ptr = _pointer_maker(types.float32)
i32_ptr = _pointer_maker(types.int32)
i64_ptr = _pointer_maker(types.int64)
u8_ptr = _pointer_maker(types.uint8)
u16_ptr = _pointer_maker(types.uint16)

_FLOATS = types.CPointer(types.float32)


def _element(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, ty: ir.Type) -> ir.Value:
    return builder.bitcast(builder.gep(pointer, [index]), ty.as_pointer())


@intrinsic
def vload(typingctx, pointer, index):
    """WIDTH floats from ``pointer[index:]`` (any alignment)."""

    def codegen(context, builder, signature, args):
        return builder.load(_element(builder, args[0], args[1], _VEC), align=4)

    return vec_t(_FLOATS, types.int64), codegen


@intrinsic
def vstore(typingctx, pointer, index, value):
    """Write WIDTH floats to ``pointer[index:]``."""

    def codegen(context, builder, signature, args):
        builder.store(args[2], _element(builder, args[0], args[1], _VEC), align=4)
        return context.get_dummy_value()

    return types.void(_FLOATS, types.int64, vec_t), codegen


@intrinsic
def vload_bf16(typingctx, pointer, index):
    """WIDTH bfloat16 values (held as uint16) from ``pointer[index:]``, widened to float32."""

    def codegen(context, builder, signature, args):
        half = ir.VectorType(ir.IntType(16), WIDTH)
        raw = builder.load(_element(builder, args[0], args[1], half), align=2)
        wide = builder.shl(builder.zext(raw, _IVEC), ir.Constant(_IVEC, [16] * WIDTH))
        return builder.bitcast(wide, _VEC)

    return vec_t(types.CPointer(types.uint16), types.int64), codegen


@intrinsic
def vsplat(typingctx, scalar):
    """The same float in every lane."""

    def codegen(context, builder, signature, args):
        return _splat(args[0], _VEC, builder)

    return vec_t(types.float32), codegen


def _binary(emit: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]) -> Callable[..., Any]:
    @intrinsic
    def op(typingctx, a, b):
        def codegen(context, builder, signature, args):
            return emit(builder, args[0], args[1])

        return vec_t(vec_t, vec_t), codegen

    return op


vadd = _binary(lambda b, x, y: b.fadd(x, y, flags=_FAST))
vsub = _binary(lambda b, x, y: b.fsub(x, y))
vmul = _binary(lambda b, x, y: b.fmul(x, y))
vdiv = _binary(lambda b, x, y: b.fdiv(x, y))
vmax = _binary(lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))


@intrinsic
def vfma(typingctx, a, b, c):
    """a * b + c, fused where the CPU can."""

    def codegen(context, builder, signature, args):
        return _call(builder, "llvm.fmuladd", list(args))

    return vec_t(vec_t, vec_t, vec_t), codegen


def _reduce(builder: ir.IRBuilder, x: ir.Value, emit: Callable[..., ir.Value]) -> ir.Value:
    lanes = WIDTH
    while lanes > 1:
        lanes //= 2
        low = _shuffle(builder, x, x, list(range(lanes)))
        high = _shuffle(builder, x, x, list(range(lanes, 2 * lanes)))
        x = emit(builder, low, high)
    return builder.extract_element(x, ir.Constant(_I32, 0))


@intrinsic
def vreduce_max(typingctx, x):
    """Largest lane."""

    def codegen(context, builder, signature, args):
        return _reduce(builder, args[0], lambda b, p, q: b.select(b.fcmp_ordered(">", p, q), p, q))

    return types.float32(vec_t), codegen


@intrinsic
def vreduce_add(typingctx, x):
    """Sum of the lanes."""

    def codegen(context, builder, signature, args):
        return _reduce(builder, args[0], lambda b, p, q: b.fadd(p, q))

    return types.float32(vec_t), codegen


@intrinsic
def vstore_sums4(typingctx, pointer, index, a, b, c, d):
    """``pointer[index + i]`` = lane sum of the i-th vector: four horizontal sums for the shuffles of two."""

    def codegen(context, builder, signature, args):
        def fold(x, y, groups):
            # x and y hold `groups` equal groups each; halve every group by adding its two halves.
            size = x.type.count // groups
            low = [g * size + i for g in range(2 * groups) for i in range(size // 2)]
            return builder.fadd(
                _shuffle(builder, x, y, low), _shuffle(builder, x, y, [i + size // 2 for i in low])
            )

        x = fold(fold(args[2], args[3], 1), fold(args[4], args[5], 1), 2)
        while x.type.count > 4:
            size = x.type.count // 4
            low = [g * size + i for g in range(4) for i in range(size // 2)]
            x = builder.fadd(
                _shuffle(builder, x, x, low), _shuffle(builder, x, x, [i + size // 2 for i in low])
            )
        builder.store(x, _element(builder, args[0], args[1], x.type), align=4)
        return context.get_dummy_value()

    return types.void(_FLOATS, types.int64, vec_t, vec_t, vec_t, vec_t), codegen


# Minimax polynomial of 2**f on [-0.5, 0.5]; relative error below 2e-7 in float32.
_EXP2 = (1.0, 0.6931471805, 0.2402265069, 0.0555041087, 0.0096181291, 0.0013333558, 0.00015403530)


def _exp2(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    tiny = builder.fcmp_ordered("<", x, _const(-126.0))
    x = builder.select(tiny, _const(-126.0), x)
    x = builder.select(builder.fcmp_ordered(">", x, _const(126.0)), _const(126.0), x)
    whole = _call(builder, "llvm.floor", [builder.fadd(x, _const(0.5))])
    part = builder.fsub(x, whole)
    y = _const(_EXP2[-1])
    for coefficient in reversed(_EXP2[:-1]):
        y = _call(builder, "llvm.fmuladd", [y, part, _const(coefficient)])
    biased = builder.add(builder.fptosi(whole, _IVEC), ir.Constant(_IVEC, [127] * WIDTH))
    power = builder.bitcast(builder.shl(biased, ir.Constant(_IVEC, [23] * WIDTH)), _VEC)
    return builder.select(tiny, _const(0.0), builder.fmul(y, power))


@intrinsic
def vexp2(typingctx, x):
    """2**x; exactly 0 below 2**-126, clamped at 2**126."""

    def codegen(context, builder, signature, args):
        return _exp2(builder, args[0])

    return vec_t(vec_t), codegen


@intrinsic
def exp2f(typingctx, x):
    """Scalar 2**x with the same polynomial as ``vexp2``."""

    def codegen(context, builder, signature, args):
        y = _exp2(builder, _splat(args[0], _VEC, builder))
        return builder.extract_element(y, ir.Constant(_I32, 0))

    return types.float32(types.float32), codegen


@intrinsic
def sqrtf(typingctx, x):
    """Square root of a float32."""

    def codegen(context, builder, signature, args):
        fn = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_F32, [_F32]), "llvm.sqrt.f32")
        return builder.call(fn, [args[0]])

    return types.float32(types.float32), codegen


@intrinsic
def bits_f32(typingctx, bits):
    """The float32 whose bits are the low half of an int64."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.trunc(args[0], _I32), _F32)

    return types.float32(types.int64), codegen


@intrinsic
def fetch_add(typingctx, pointer, index):
    """Atomically add one to ``pointer[index]``; returns the value before."""

    def codegen(context, builder, signature, args):
        cell = builder.gep(args[0], [args[1]])
        return builder.atomic_rmw("add", cell, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.CPointer(types.int64), types.int64), codegen


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at a byte address."""

    def codegen(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        fn = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32]), "llvm.prefetch.p0"
        )
        read, keep, data = (ir.Constant(_I32, value) for value in (0, 3, 1))
        builder.call(fn, [builder.inttoptr(args[0], byte), read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen
