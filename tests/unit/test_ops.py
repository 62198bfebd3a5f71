"""Fused operations against SGLang's own portable forms, in float64 where that matters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding, RotaryEmbedding

from rapid_sgl.platform import ops


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def norm(dim: int, dtype: torch.dtype = torch.float32) -> RMSNorm:
    layer = RMSNorm(dim, eps=1e-5)
    layer.weight.data = torch.randn(dim).to(dtype)
    return layer


@pytest.mark.parametrize("shape", [(1, 576), (5, 37), (200, 64), (2, 7, 48), (0, 64)])
def test_rms_norm(shape):
    layer = norm(shape[-1])
    x, residual = torch.randn(shape), torch.randn(shape) * 3
    kept = x.clone()
    torch.testing.assert_close(ops.rms_norm(layer, x), layer.forward_native(x))
    assert torch.equal(x, kept), "without a residual the input stays"
    want, want_residual = layer.forward_native(x, residual)
    got, got_residual = ops.rms_norm(layer, x, residual)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_residual, want_residual)
    assert got_residual is residual and got is x


def test_rms_norm_leaves_other_cases_to_sglang():
    layer = norm(64, torch.bfloat16)
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(ops.rms_norm(layer, x), layer.forward_native(x))
    part = RMSNorm(64, var_hidden_size=32)
    y = torch.randn(3, 64)
    strided = torch.randn(3, 128)[:, ::2]
    torch.testing.assert_close(ops.rms_norm(part, strided), part.forward_native(strided))
    torch.testing.assert_close(ops.rms_norm(part, y), part.forward_native(y))
    with pytest.raises(ValueError, match="hidden_size"):
        ops.rms_norm(norm(64), torch.randn(2, 32))


@pytest.mark.parametrize("shape", [(1, 3072), (7, 74), (300, 128), (2, 3, 32), (0, 32)])
def test_silu_and_mul(shape):
    op, x = SiluAndMul(), torch.randn(shape) * 5
    torch.testing.assert_close(ops.silu_and_mul(op, x), op.forward_native(x), rtol=1e-5, atol=1e-6)


def test_silu_survives_extremes():
    op, x = SiluAndMul(), torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4, 1.0] + [1.0] * 6])
    torch.testing.assert_close(ops.silu_and_mul(op, x), op.forward_native(x))
    half = torch.randn(2, 64).bfloat16()
    assert torch.equal(ops.silu_and_mul(op, half), op.forward_native(half))


def rope(cls=RotaryEmbedding, head=64, rotated=64, neox=True, **extra):
    return cls(head, rotated, 500, 10000, neox, dtype=torch.float32, **extra)


@pytest.mark.parametrize(("head", "rotated"), [(64, 64), (80, 32), (36, 36), (128, 128)])
@pytest.mark.parametrize("tokens", [1, 5, 100])
def test_rotary_on_slices_of_a_fused_projection(head, rotated, tokens):
    op = rope(head=head, rotated=rotated)
    qkv = torch.randn(tokens, 5 * head)
    q, k, v = qkv.split([3 * head, head, head], dim=-1)
    positions = torch.randint(0, 500, (tokens,))
    value = v.clone()
    want_q, want_k = op.forward_native(positions, q.clone(), k.clone())
    got_q, got_k = ops.rotary_embedding(op, positions, q, k)
    torch.testing.assert_close(got_q, want_q)
    torch.testing.assert_close(got_k, want_k)
    assert got_q is q and torch.equal(v, value)


@pytest.mark.parametrize("case", ["interleaved", "offsets", "bfloat16", "3-d"])
def test_rotary_leaves_other_cases_to_sglang(case):
    op = rope(neox=case != "interleaved")
    q, k, positions = torch.randn(4, 128), torch.randn(4, 64), torch.arange(4)
    offsets = torch.tensor([1, 2, 3, 4]) if case == "offsets" else None
    if case == "bfloat16":
        q, k = q.bfloat16(), k.bfloat16()
    if case == "3-d":
        q, k = q.view(4, 2, 64), k.view(4, 1, 64)
    want = op.forward_native(positions, q.clone(), k.clone(), offsets)
    got = ops.rotary_embedding(op, positions, q, k, offsets)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_rotary_refuses_positions_outside_its_table():
    with pytest.raises(IndexError, match="500"):
        ops.rotary_embedding(rope(), torch.tensor([3, 500]), torch.randn(2, 64), torch.randn(2, 64))


def test_register_reaches_sglangs_dispatch(monkeypatch):
    monkeypatch.setattr(BaseFusedOp, "_oot_forward_registry", {})
    ops.register()
    registered = BaseFusedOp._oot_forward_registry[ops.PLATFORM_KEY]
    assert registered[RMSNorm] is ops.rms_norm and registered[SiluAndMul] is ops.silu_and_mul
    for cls in registered:
        if issubclass(cls, RotaryEmbedding):
            # a subclass with a forward of its own must not be given this one
            assert cls.forward_native is RotaryEmbedding.forward_native
    scaled = rope(LinearScalingRotaryEmbedding, scaling_factors=2.0)
    q, k, positions = torch.randn(3, 64), torch.randn(3, 64), torch.tensor([0, 7, 99])
    want = scaled.forward_native(positions, q.clone(), k.clone())
    got = registered[LinearScalingRotaryEmbedding](scaled, positions, q, k)
    torch.testing.assert_close(got[0], want[0])


@pytest.mark.parametrize(("outputs", "dim"), [(64, 576), (4, 16), (100, 1536), (66, 64), (64, 50)])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, ops.LINEAR_ROWS, ops.LINEAR_ROWS + 1])
def test_linear(outputs, dim, rows):
    x, weight, bias = torch.randn(rows, dim), torch.randn(outputs, dim), torch.randn(outputs)
    want = x.double() @ weight.double().T
    torch.testing.assert_close(ops.linear(x, weight).double(), want, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(ops.linear(x, weight, bias).double(), want + bias, rtol=1e-4, atol=1e-3)


def test_linear_of_a_row_does_not_depend_on_its_company():
    x, weight = torch.randn(9, 576), torch.randn(960, 576)
    together = ops.linear(x, weight)
    assert all(torch.equal(together[i : i + 1], ops.linear(x[i : i + 1], weight)) for i in range(9))


def test_linear_hooks_fall_back():
    layer = SimpleNamespace(weight=torch.randn(64, 32))
    calls = []

    def original(*args, **kwargs):
        calls.append((args, kwargs))
        return "original"

    x = torch.randn(3, 32)
    torch.testing.assert_close(ops.linear_apply(original, None, layer, x), x @ layer.weight.T)
    torch.testing.assert_close(ops.lm_head_logits(original, None, x, layer, out=None), x @ layer.weight.T)
    assert not calls
    assert ops.linear_apply(original, None, layer, x.bfloat16()) == "original"
    assert ops.lm_head_logits(original, None, x.bfloat16(), layer, out=7) == "original"
    assert calls[1][1] == {"out": 7}
