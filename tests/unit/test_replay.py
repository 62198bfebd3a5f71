"""Replayed forward passes against the same passes without a tape."""

from __future__ import annotations

import pytest
import torch
from attention_world import make_batch, make_world
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import nn

from rapid_sgl.drafter.twin import Int8Method
from rapid_sgl.platform import kernels_int8, ops, replay, tape
from rapid_sgl.platform.tape import Arena, TapeError

HEADS, KV_HEADS, DIM, HIDDEN = 6, 2, 64, 96
WIDTHS = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)


@pytest.fixture(autouse=True)
def on_the_platform(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(RMSNorm, "forward", ops.rms_norm)
    monkeypatch.setattr(RotaryEmbedding, "forward", ops.rotary_embedding)
    assert issubclass(RMSNorm, BaseFusedOp)


class Decoder(nn.Module):
    """Two layers in SGLang's manner, of the platform's operations: norm, projections, rotary, attention, residual."""

    def __init__(self, layer, bias=False, twice=False):
        super().__init__()
        self.embed_tokens = nn.Embedding(50, HIDDEN)
        self.attention, self.twice, self.calls = layer, twice, 0
        self.norms = nn.ModuleList(RMSNorm(HIDDEN) for _ in range(3))
        self.qkv = nn.Parameter(torch.randn(2, sum(WIDTHS), HIDDEN) / 10)
        self.bias = nn.Parameter(torch.randn(2, sum(WIDTHS))) if bias else None
        self.out = nn.Parameter(torch.randn(2, HIDDEN, WIDTHS[0]) / 10)
        self.rotary = RotaryEmbedding(DIM, DIM, 512, 10000, True, torch.float32)

    def forward(self, input_ids, positions, forward_batch, input_embeds=None):
        self.calls += 1
        x = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
        residual = None
        for i in range(2):
            if residual is None:
                x, residual = self.norms[0](x), x
            else:
                x, residual = self.norms[i](x, residual)
            bias = None if self.bias is None else self.bias[i]
            q, k, v = ops.linear(x, self.qkv[i], bias).split(WIDTHS, -1)
            q, k = self.rotary(positions, q, k)
            k, v = (t.view(-1, KV_HEADS, DIM) for t in (k, v))
            x = ops.linear(backend_of(forward_batch)(q, k, v, self.attention, forward_batch), self.out[i])
            if self.twice:
                x = x * 2
        return self.norms[2](x, residual)[0]


def backend_of(batch):
    return batch.backend.forward_decode if batch.forward_mode.is_decode() else batch.backend.forward_extend


class Both:
    """One decoder run twice over equal worlds: replayed where it can be, and by its own forward."""

    def __init__(self, **options):
        self.worlds = [make_world(length=300, rows=4, kind="scattered") for _ in range(2)]
        self.backends = [world.backend() for world in self.worlds]
        self.decoder = Decoder(self.worlds[0].layer, **options)
        self.replayed = replay.ReplayedForward(self.decoder)
        self.adapters = [None]

    def check(self, mode, rows, counts, prefixes):
        """Both give the same hidden states and the same pool, to the last bit."""
        lengths = [p + c for p, c in zip(prefixes, counts, strict=True)]
        at = [range(p, n) for p, n in zip(prefixes, lengths, strict=True)]
        positions = torch.tensor([i for span in at for i in span])
        ids = torch.randint(50, (len(positions),))
        results = []
        for world, backend, forward in zip(
            self.worlds, self.backends, (self.replayed, self.replayed.eager), strict=True
        ):
            batch = make_batch(mode, rows, counts, prefixes)
            batch.positions = positions
            slots = [int(world.table[row, i]) for row, span in zip(rows, at, strict=True) for i in span]
            batch.out_cache_loc = torch.tensor(slots)
            batch.backend, batch.lora_ids = backend, self.adapters
            backend.init_forward_metadata(batch)
            with forward_context(ForwardContext(attn_backend=backend)):
                results.append(forward(ids, positions, batch))
        assert torch.equal(*results)
        assert torch.equal(self.worlds[0].pool.k_buffer[0], self.worlds[1].pool.k_buffer[0])
        assert torch.equal(self.worlds[0].pool.v_buffer[0], self.worlds[1].pool.v_buffer[0])

    def own_calls(self, *pass_):
        before = self.decoder.calls
        self.check(*pass_)
        return self.decoder.calls - before - 1  # one is the comparison's


@pytest.mark.parametrize("bias", [False, True])
def test_replayed_passes_equal_eager_ones(bias):
    both = Both(bias=bias)
    assert both.own_calls(ForwardMode.DECODE, [0, 2], [1, 1], [10, 250]) == 1, "the first one is recorded"
    # other rows, lengths, plans (one with partial results to merge, one without) and slots
    assert both.own_calls(ForwardMode.DECODE, [1, 3], [1, 1], [299, 3]) == 0
    assert both.own_calls(ForwardMode.DECODE, [3, 1], [1, 1], [1, 2]) == 0
    assert both.own_calls(ForwardMode.TARGET_VERIFY, [0, 1], [5, 5], [200, 17]) == 1
    assert both.own_calls(ForwardMode.TARGET_VERIFY, [2, 3], [5, 5], [280, 290]) == 0
    assert both.own_calls(ForwardMode.DECODE, [0, 2], [1, 1], [12, 251]) == 0, "tapes share their memory"
    assert both.own_calls(ForwardMode.EXTEND, [2], [40], [100]) == 1
    assert both.own_calls(ForwardMode.EXTEND, [1], [40], [0]) == 0


def test_long_passes_are_not_recorded():
    both = Both()
    for _ in range(2):
        assert both.own_calls(ForwardMode.EXTEND, [2], [ops.LINEAR_ROWS + 1], [100]) == 1


def test_work_outside_the_kernels_is_noticed():
    both = Both(twice=True)
    for _ in range(3):  # recorded up to the foreign operation, then once more without a tape
        both.check(ForwardMode.DECODE, [0, 2], [1, 1], [10, 250])
    assert both.own_calls(ForwardMode.DECODE, [0, 2], [1, 1], [10, 250]) == 1


def test_hooks_of_the_user_go_on_being_called():
    both, seen = Both(), []
    both.decoder.norms[1].register_forward_hook(lambda *_: seen.append(1))
    for calls in (2, 4, 6):  # one by each of the two that are compared
        both.check(ForwardMode.DECODE, [0], [1], [50])
        assert len(seen) == calls


def test_passes_with_an_adapter_are_not_replayed():
    both = Both()
    pass_ = (ForwardMode.DECODE, [0], [1], [50])
    both.check(*pass_)
    assert both.own_calls(*pass_) == 0
    both.adapters = ["adapter"]
    assert both.own_calls(*pass_) == 1


def test_new_weights_are_recorded_again():
    both = Both()
    pass_ = (ForwardMode.DECODE, [0], [1], [50])
    both.check(*pass_)
    both.decoder.out.data.mul_(2)
    assert both.own_calls(*pass_) == 0, "changed where they lie, they are read there"
    both.decoder.out.data = torch.randn_like(both.decoder.out)
    assert both.own_calls(*pass_) == 1


def test_a_position_outside_the_table_is_refused_as_before():
    both = Both()
    both.check(ForwardMode.DECODE, [0], [1], [50])
    backend = both.backends[0]
    batch = make_batch(ForwardMode.DECODE, [0], [1], [60])
    batch.backend, batch.out_cache_loc = backend, torch.tensor([5])
    batch.positions = torch.tensor([512])
    backend.init_forward_metadata(batch)
    with (
        pytest.raises(IndexError, match="raise --context-length"),
        forward_context(ForwardContext(attn_backend=backend)),
    ):
        both.replayed(torch.tensor([1]), batch.positions, batch)


def test_twins_layers_are_recorded_too():
    layer = nn.Module()
    layer.weight_int8, layer.weight_scale = kernels_int8.quantize(torch.randn(64, 64))
    x = torch.randn(3, 64)
    recorded = tape.Tape(Arena(1 << 16))
    with tape.recording(recorded), replay._NoHiddenWork():
        out = Int8Method().apply(layer, x)
    recorded.finish()
    want = out.clone()
    out.zero_()
    recorded.rewind()
    recorded.run()
    assert torch.equal(out, want)


def test_arena_gives_memory_again_once_no_view_is_left():
    arena = Arena(1 << 12)
    first = arena.empty(4, 16)
    where, view = first.data_ptr(), first[1:]
    del first
    assert arena.empty(64).data_ptr() != where, "a view still reads it"
    del view
    assert arena.empty(2, 32).data_ptr() == where
    with pytest.raises(TapeError, match="MiB"):
        arena.empty(1 << 12)
