"""Fused float32 replacements for SGLang's small per-layer operations, through its own out-of-tree override.

SGLang's portable forms are chains of small torch calls: for a few tokens their launch cost, not their arithmetic, is
what a layer waits for. Each replacement handles the case that serving meets and leaves every other one to
``forward_native``. Like SGLang's CUDA kernels they work in place where those do (residual and normed activations,
rotated queries and keys).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from rapid_sgl.platform import kernels_linear, kernels_ops, tape
from rapid_sgl.platform.kernels_launch import compiled, float_bits

PLATFORM_KEY = "rapid_cpu"
# Rows of x up to which this kernel is used: the verify pass of 16 requests with chains of seven. Against MKL on an AMD
# EPYC: 2.4 times as fast at 64 and at 128 rows of the embedded model; for 4096-wide layers 2.2 times at 16 rows, 1.6 at
# 64, 1.2 at 128. (On an Intel host, where MKL is at home, 4096-wide layers were 2 times as fast at 5 rows, 1.1 at 48.)
LINEAR_ROWS = 128
# Rows that one thread does before a second one is worth waking.
ROWS_ALONE = 4 * kernels_ops.ROWS


def _run(build: Callable[..., Any], rows: int, *fields: int) -> Any:
    """Run a row kernel; returns the argument block as the kernel left it."""
    block = (ctypes.c_int64 * (3 + len(fields)))(0, rows, 0, *fields)
    threads = 1 if rows <= ROWS_ALONE else torch.get_num_threads()
    tape.launch(compiled(build), block, threads)
    return block


def _plain(*tensors: torch.Tensor) -> bool:
    return all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)


def rms_norm(
    self: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    """``RMSNorm.forward``: x / rms(x) * weight; with a residual (x, residual), both updated in place."""
    weight = self.weight
    if (
        post_residual_addition is not None
        or self.variance_size_override is not None
        or x.shape[-1] != weight.shape[0]
        or not _plain(x, weight)
        or self.override_orig_dtype not in (None, torch.float32)
        or (residual is not None and not (_plain(residual) and residual.shape == x.shape))
    ):
        return self.forward_native(x, residual, post_residual_addition, quant_linear)
    dim = weight.shape[0]
    out = tape.empty(*x.shape) if residual is None else x
    _run(
        kernels_ops.build_rms_norm,
        x.numel() // dim,
        x.data_ptr(),
        residual.data_ptr() if residual is not None else 0,
        weight.data_ptr(),
        out.data_ptr(),
        dim,
        float_bits(self.variance_epsilon),
    )
    return out if residual is None else (out, residual)


def silu_and_mul(self: Any, x: torch.Tensor) -> torch.Tensor:
    """``SiluAndMul.forward``: silu of the first half of the last axis times the second half."""
    if not _plain(x) or x.shape[-1] % 2:
        return self.forward_native(x)
    dim = x.shape[-1] // 2
    out = tape.empty(*x.shape[:-1], dim)
    if x.numel():
        _run(kernels_ops.build_silu_and_mul, x.numel() // (2 * dim), x.data_ptr(), out.data_ptr(), dim)
    return out


def store_heads(buffer: torch.Tensor, slots: torch.Tensor, heads: torch.Tensor) -> None:
    """buffer[slots] = heads, where a tape can see it; int64 slots [tokens], heads [tokens, heads, dim]."""
    if not (
        buffer.dtype == heads.dtype == torch.float32
        and buffer.stride(2) == heads.stride(2) == 1
        and heads.stride(1) == heads.shape[2]
        and slots.is_contiguous()
    ):
        buffer.index_copy_(0, slots, heads)
        return
    _run(
        kernels_ops.build_store,
        len(slots),
        slots.data_ptr(),
        heads.data_ptr(),
        buffer.data_ptr(),
        heads.stride(0),
        buffer.stride(1),
        buffer.stride(0),
        heads.shape[1],
        heads.shape[2],
    )


def _rows_of_heads(t: torch.Tensor, tokens: int, head_size: int) -> bool:
    """Whether t is float32 [tokens, heads * head_size], each token contiguous (a slice of a fused projection is)."""
    return (
        t.dtype == torch.float32
        and t.dim() == 2
        and t.shape[0] == tokens
        and t.stride(1) == 1
        and not t.shape[1] % head_size
    )


def rotary_embedding(
    self: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``RotaryEmbedding.forward``, neox style: rotates query and key in place.

    Raises IndexError for a position outside the cos/sin table.
    """
    tokens, table = positions.numel(), self.cos_sin_cache
    if (
        offsets is not None
        or fused_set_kv_buffer_arg is not None
        or not self.is_neox_style
        or positions.dtype != torch.int64
        or not positions.is_contiguous()
        or not _plain(table)
        or not (_rows_of_heads(query, tokens, self.head_size) and _rows_of_heads(key, tokens, self.head_size))
    ):
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    recorded = tape.current()
    if recorded is not None:
        recorded.positions_below = min(recorded.positions_below, table.shape[0])
    block = _run(
        kernels_ops.build_rotary,
        tokens,
        query.data_ptr(),
        key.data_ptr(),
        query.stride(0),
        key.stride(0),
        query.shape[1] // self.head_size,
        key.shape[1] // self.head_size,
        self.head_size,
        self.rotary_dim // 2,
        positions.data_ptr(),
        table.data_ptr(),
        table.shape[0],
        0,
    )
    if block[kernels_ops.E_BAD]:
        raise IndexError(
            f"positions up to {int(positions.max())} exceed the rotary table of {table.shape[0]}; "
            "raise --context-length or shorten the prompt"
        )
    return query, key


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias, as ``torch.nn.functional.linear``; weight [outputs, dim].

    For up to ``LINEAR_ROWS`` float32 rows a row's result does not depend, to the last bit, on how many
    others are computed with it: verification sees the very activations that decoding would.
    """
    outputs, dim = weight.shape
    rows = x.numel() // dim
    if not (0 < rows <= LINEAR_ROWS and outputs % 4 == 0 and dim % 16 == 0 and _plain(x, weight)):
        return F.linear(x, weight, bias)
    out = tape.empty(*x.shape[:-1], outputs)
    block = (ctypes.c_int64 * 8)(0, outputs, 0, rows, x.data_ptr(), weight.data_ptr(), out.data_ptr(), dim)
    tape.launch(compiled(kernels_linear.build_linear), block, torch.get_num_threads())
    if bias is None:
        return out
    if not _plain(bias):
        return out.add_(bias)
    _run(kernels_ops.build_add_bias, rows, out.data_ptr(), bias.data_ptr(), outputs)
    return out


def linear_apply(
    original: Callable[..., Any], method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """AROUND hook for ``UnquantizedLinearMethod.apply``."""
    if x.dtype != torch.float32:
        return original(method, layer, x, bias)
    return linear(x, layer.weight, bias)


def lm_head_logits(
    original: Callable[..., Any],
    processor: Any,
    hidden_states: torch.Tensor,
    lm_head: Any,
    embedding_bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """AROUND hook for ``LogitsProcessor._compute_lm_head``; like it, adds no bias to a plain head."""
    weight = getattr(lm_head, "weight", None)
    if hasattr(lm_head, "set_lora") or weight is None or not _plain(hidden_states, weight):
        return original(processor, hidden_states, lm_head, embedding_bias, **options)
    return linear(hidden_states, weight)


def register() -> None:
    """Make SGLang use these on the platform; called once per process before a model is built.

    Subclasses of RotaryEmbedding that only compute another cos/sin table share its forward.
    """
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding import base, rope_variant, yarn

    for op, forward in ((RMSNorm, rms_norm), (SiluAndMul, silu_and_mul)):
        BaseFusedOp.register_oot_forward(op, forward, PLATFORM_KEY)
    for op in (
        base.RotaryEmbedding,
        base.LinearScalingRotaryEmbedding,
        rope_variant.Llama3RotaryEmbedding,
        rope_variant.DynamicNTKScalingRotaryEmbedding,
        yarn.YaRNScalingRotaryEmbedding,
    ):
        BaseFusedOp.register_oot_forward(op, rotary_embedding, PLATFORM_KEY)
