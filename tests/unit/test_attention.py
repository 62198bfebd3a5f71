"""PortableCpuAttnBackend against explicit float64 attention over the row table."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attention_world import (
    TOLERANCE,
    attend,
    make_batch,
    make_world,
    random_queries,
    reference,
    slots_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from rapid_sgl.drafter.backend import RunnerOverRows
from rapid_sgl.platform import kernels_launch
from rapid_sgl.platform.attention import PortableCpuAttnBackend, tree_masks

SCHEDULES = {
    ForwardMode.DECODE: ([3, 0, 1], [1, 1, 1], [299, 0, 130]),
    ForwardMode.TARGET_VERIFY: ([2, 0, 1], [5, 5, 5], [290, 0, 61]),
    ForwardMode.EXTEND: ([1, 3, 0, 2], [40, 1, 130, 300], [0, 250, 64, 0]),
}


@pytest.mark.parametrize("mode", list(SCHEDULES), ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("kind", ["contiguous", "scattered", "mixed"])
@pytest.mark.parametrize(
    ("heads", "dim", "v_dim", "dtype"),
    [
        ((6, 2), 64, None, torch.float32),
        ((4, 4), 80, None, torch.float32),
        ((8, 1), 128, None, torch.bfloat16),
        ((6, 2), 37, None, torch.float32),
        ((4, 2), 48, 33, torch.bfloat16),
        ((3, 1), 96, 64, torch.float32),
    ],
)
def test_matches_reference(mode, kind, heads, dim, v_dim, dtype):
    world = make_world(q_heads=heads[0], kv_heads=heads[1], dim=dim, v_dim=v_dim, dtype=dtype, kind=kind)
    rows, counts, prefixes = SCHEDULES[mode]
    q = random_queries(world, sum(counts))
    got = attend(world, q, make_batch(mode, rows, counts, prefixes))
    want = reference(world, q, rows, counts, prefixes)
    assert got.dtype == dtype and got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("mode", list(SCHEDULES), ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize(("window", "cap"), [(1, 0.0), (63, 0.0), (100, 0.0), (-1, 2.0), (70, 30.0)])
def test_window_and_soft_cap(mode, window, cap):
    world = make_world(window=window, cap=cap, kind="mixed")
    rows, counts, prefixes = SCHEDULES[mode]
    q = random_queries(world, sum(counts)) * 3
    got = attend(world, q, make_batch(mode, rows, counts, prefixes))
    want = reference(world, q, rows, counts, prefixes)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[torch.float32])


def random_tree(rng: np.random.Generator, size: int) -> np.ndarray:
    """mask[i, j]: node j is i or an ancestor of i."""
    mask = np.eye(size, dtype=bool)
    for node in range(1, size):
        mask[node] |= mask[rng.integers(node)]
    return mask


@pytest.mark.parametrize("layout", ["full", "full with spare bytes", "qlen"])
@pytest.mark.parametrize("size", [4, 40])
def test_tree_mask(layout, size):
    world = make_world(kind="scattered")
    rng = np.random.default_rng(3)
    rows, counts, prefixes = [1, 0, 3], [size] * 3, [200, 0, 77]
    trees = [random_tree(rng, size) for _ in rows]
    pieces = [
        tree if layout == "qlen" else np.concatenate([np.ones((size, p), bool), tree], axis=1)
        for tree, p in zip(trees, prefixes, strict=True)
    ]
    flat = torch.from_numpy(np.concatenate([piece.reshape(-1) for piece in pieces]))
    if layout == "full with spare bytes":
        flat = torch.cat([flat, torch.zeros(99, dtype=torch.bool)])
    q = random_queries(world, sum(counts))
    got = attend(world, q, make_batch(ForwardMode.TARGET_VERIFY, rows, counts, prefixes, flat))
    want = reference(world, q, rows, counts, prefixes, trees)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[torch.float32])


def test_chain_masks_cost_nothing_and_bad_masks_are_refused():
    chain = torch.ones(3, 3, dtype=torch.bool).tril().flatten()
    assert tree_masks(chain, [3], [50])[0] is None
    with pytest.raises(ValueError, match="tree mask has 10 entries"):
        tree_masks(torch.ones(10, dtype=torch.bool), [3], [50])
    hidden = torch.ones(3, 53, dtype=torch.bool)
    hidden[1, 7] = False
    with pytest.raises(ValueError, match="hides cached tokens"):
        tree_masks(hidden.flatten(), [3], [50])


def test_ragged_verify():
    world = make_world()
    rows, counts, prefixes = [0, 1, 2], [2, 7, 1], [10, 200, 128]
    batch = make_batch(ForwardMode.TARGET_VERIFY, rows, counts, prefixes)
    batch.spec_info.ragged_verify_layout = SimpleNamespace(verify_lens_cpu=counts)
    q = random_queries(world, sum(counts))
    torch.testing.assert_close(
        attend(world, q, batch).double(), reference(world, q, rows, counts, prefixes), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_query_in_every_mode_and_company(dtype):
    """What speculative decoding rests on: a query's result does not depend on how it was asked."""
    world = make_world(length=1500, rows=3, dtype=dtype, kind="mixed")
    prefix, count = 1400, 9
    q = random_queries(world, count)
    chain = attend(world, q, make_batch(ForwardMode.TARGET_VERIFY, [1], [count], [prefix]))
    extended = attend(world, q, make_batch(ForwardMode.EXTEND, [1], [count], [prefix]))
    singly = torch.cat(
        [
            attend(world, q[i : i + 1], make_batch(ForwardMode.DECODE, [1], [1], [prefix + i]))
            for i in range(count)
        ]
    )
    others = random_queries(world, 2, seed=5)
    crowd = torch.cat([others[:1], q[4:5], others[1:]])
    crowded = attend(
        world, crowd, make_batch(ForwardMode.DECODE, [0, 1, 2], [1, 1, 1], [1499, prefix + 4, 3])
    )
    tight = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(extended, chain, rtol=0, atol=tight)
    torch.testing.assert_close(singly, chain, rtol=0, atol=tight)
    torch.testing.assert_close(crowded[1:2], singly[4:5], rtol=0, atol=tight)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), length=st.integers(1, 200), window=st.sampled_from([-1, 40]))
def test_slot_order_does_not_matter(seed, length, window):
    world = make_world(rows=2, length=220, window=window, seed=seed)
    q = random_queries(world, 2, seed)
    batch = make_batch(ForwardMode.DECODE, [0, 1], [1, 1], [length - 1, 219])
    before = attend(world, q, batch)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(world.pool.k_buffer[0].shape[0]))
    for buffer in (world.pool.k_buffer[0], world.pool.v_buffer[0]):
        moved = torch.empty_like(buffer)
        moved[order] = buffer
        buffer.copy_(moved)
    world.table = order[world.table.long()].int()
    torch.testing.assert_close(attend(world, q, batch), before, rtol=0, atol=1e-6)


def test_stores_new_keys_before_attending():
    world = make_world()
    rows, prefix = [2], [120]
    q = random_queries(world, 3)
    k, v = torch.randn(3, 2, 64), torch.randn(3, 2, 64)
    batch = make_batch(ForwardMode.TARGET_VERIFY, rows, [3], prefix)
    batch.out_cache_loc = world.table[2, 120:123].long()
    backend = world.backend()
    backend.init_forward_metadata(batch)
    got = backend.forward(q, k, v, world.layer, batch)
    assert torch.equal(world.pool.k_buffer[0][batch.out_cache_loc], k)
    torch.testing.assert_close(got.double(), reference(world, q, rows, [3], prefix), rtol=0, atol=2e-5)


def test_rows_come_from_the_given_table_only():
    world = make_world()
    other = slots_of("scattered", 4, 300, 1300, seed=9)
    runner = SimpleNamespace(
        token_to_kv_pool=world.pool,
        token_to_kv_pool_allocator=None,
        req_to_token_pool=SimpleNamespace(size=4, max_context_len=300, device="cpu"),
    )
    backend = PortableCpuAttnBackend(RunnerOverRows(runner, other))
    q = random_queries(world, 1)
    batch = make_batch(ForwardMode.DECODE, [3], [1], [222])
    backend.init_forward_metadata(batch)
    got = backend.forward(q, None, None, world.layer, batch, save_kv_cache=False)
    world.table = other
    torch.testing.assert_close(got.double(), reference(world, q, [3], [1], [222]), rtol=0, atol=2e-5)


def test_padding_tokens_and_empty_batches():
    world = make_world()
    q = random_queries(world, 4)
    got = attend(world, q, make_batch(ForwardMode.DECODE, [0, 1], [1, 1], [10, 20]))
    want = reference(world, q[:2], [0, 1], [1, 1], [10, 20])
    torch.testing.assert_close(got[:2].double(), want, rtol=0, atol=2e-5)
    assert not got[2:].any()
    idle = attend(world, q[:0], make_batch(ForwardMode.IDLE, [], [], []))
    assert idle.shape == (0, 6 * 64)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_thread_pool_fallback_and_any_thread_count(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    world = make_world(length=2000, rows=2)
    rows, counts, prefixes = [0, 1], [3, 3], [1900, 700]
    q = random_queries(world, 6)
    batch = make_batch(ForwardMode.TARGET_VERIFY, rows, counts, prefixes)
    want = reference(world, q, rows, counts, prefixes)
    torch.testing.assert_close(attend(world, q, batch).double(), want, rtol=0, atol=2e-5)
    monkeypatch.setattr(kernels_launch, "parallel_launcher", kernels_launch.thread_pool_launcher)
    torch.testing.assert_close(attend(world, q, batch).double(), want, rtol=0, atol=2e-5)


def test_reads_sglangs_token_major_pool_too():
    world = make_world()
    swap = [b.contiguous() for b in (world.pool.k_buffer[0], world.pool.v_buffer[0])]
    world.pool.k_buffer[0], world.pool.v_buffer[0] = swap
    q = random_queries(world, 1)
    got = attend(world, q, make_batch(ForwardMode.DECODE, [1], [1], [250]))
    torch.testing.assert_close(got.double(), reference(world, q, [1], [1], [250]), rtol=0, atol=2e-5)


def test_refusals_name_the_problem():
    world = make_world()
    backend = world.backend()
    batch = make_batch(ForwardMode.DECODE, [0], [1], [5])
    backend.init_forward_metadata(batch)
    q = random_queries(world, 1)
    with pytest.raises(NotImplementedError, match="sinks"):
        backend.forward(q, None, None, world.layer, batch, save_kv_cache=False, sinks=torch.zeros(6))
    encoder = RadixAttention(6, 64, 1.0, 2, layer_id=7, attn_type=AttentionType.ENCODER_ONLY)
    with pytest.raises(NotImplementedError, match="layer 7 is not causal"):
        backend.forward(q, None, None, encoder, batch, save_kv_cache=False)
    cross = RadixAttention(6, 64, 1.0, 2, layer_id=8, is_cross_attention=True)
    with pytest.raises(NotImplementedError, match="layer 8 is not causal"):
        backend.forward(q, None, None, cross, batch, save_kv_cache=False)
    batch.encoder_lens = torch.tensor([4])
    with pytest.raises(NotImplementedError, match="encoder-decoder"):
        backend.init_forward_metadata(batch)
    world.table = world.table.long()
    with pytest.raises(ValueError, match="int32"):
        world.backend()
