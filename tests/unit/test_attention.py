"""PortableCpuAttnBackend against explicit float64 attention over the row table."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from rapid_sgl.platform import kernels_launch
from rapid_sgl.platform import kernels_layout as layout
from rapid_sgl.platform.attention import PortableCpuAttnBackend, tree_masks
from rapid_sgl.platform.kernels_plan import Queries, make_plan
from rapid_sgl.platform.kv_pool import HeadMajorKVPool

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}


@dataclass
class World:
    """A filled pool, a row table over it, and one layer."""

    pool: HeadMajorKVPool
    table: torch.Tensor
    layer: RadixAttention
    dtype: torch.dtype

    def backend(self) -> PortableCpuAttnBackend:
        return PortableCpuAttnBackend(
            SimpleNamespace(
                token_to_kv_pool=self.pool, req_to_token_pool=SimpleNamespace(req_to_token=self.table)
            )
        )


def slots_of(kind: str, rows: int, length: int, total: int, seed: int) -> torch.Tensor:
    """A row table: one run per row, random slots, or a few runs cut from all over."""
    rng = np.random.default_rng(seed)
    if kind == "contiguous":
        flat = np.arange(1, rows * length + 1)
    elif kind == "scattered":
        flat = rng.permutation(np.arange(1, total))[: rows * length]
    else:
        runs = np.array_split(np.arange(1, rows * length + 1), 11)
        flat = np.concatenate([runs[i] for i in rng.permutation(len(runs))])
    return torch.from_numpy(flat.reshape(rows, length).astype(np.int32))


def make_world(
    *,
    rows: int = 4,
    length: int = 300,
    q_heads: int = 6,
    kv_heads: int = 2,
    dim: int = 64,
    v_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    kind: str = "contiguous",
    window: int = -1,
    cap: float = 0.0,
    seed: int = 0,
) -> World:
    total = rows * length + 200
    pool = HeadMajorKVPool(
        size=total,
        page_size=1,
        dtype=dtype,
        head_num=kv_heads,
        head_dim=dim,
        v_head_dim=v_dim,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    generator = torch.Generator().manual_seed(seed)
    pool.k_buffer[0].copy_(torch.randn(pool.k_buffer[0].shape, generator=generator))
    pool.v_buffer[0].copy_(torch.randn(pool.v_buffer[0].shape, generator=generator))
    layer = RadixAttention(
        q_heads,
        dim,
        dim**-0.5,
        kv_heads,
        layer_id=0,
        logit_cap=cap,
        v_head_dim=v_dim if v_dim is not None else -1,
        sliding_window_size=window,
    )
    return World(pool, slots_of(kind, rows, length, total, seed), layer, dtype)


def reference(
    world: World, q: torch.Tensor, rows: list[int], counts: list[int], prefixes: list[int], masks=None
) -> torch.Tensor:
    """Softmax attention, one query and head at a time, in float64."""
    layer, out, token = world.layer, [], 0
    k_all, v_all = world.pool.k_buffer[0].double().numpy(), world.pool.v_buffer[0].double().numpy()
    group = layer.tp_q_head_num // layer.tp_k_head_num
    queries = q.double().view(-1, layer.tp_q_head_num, layer.qk_head_dim).numpy()
    for b, (row, count, prefix) in enumerate(zip(rows, counts, prefixes, strict=True)):
        slots = world.table[row].long().numpy()
        for i in range(count):
            position = prefix + i
            seen = list(range(prefix)) + [
                prefix + j for j in range(count) if (masks[b][i, j] if masks is not None else j <= i)
            ]
            if layer.sliding_window_size >= 0:
                seen = [key for key in seen if key >= position - layer.sliding_window_size]
            at = slots[seen]
            for h in range(layer.tp_q_head_num):
                score = k_all[at, h // group] @ queries[token, h] * layer.scaling
                if layer.logit_cap > 0:
                    score = layer.logit_cap * np.tanh(score / layer.logit_cap)
                weight = np.exp(score - score.max())
                out.append(weight @ v_all[at, h // group] / weight.sum())
            token += 1
    return torch.from_numpy(np.stack(out)).view(token, -1)


def make_batch(
    mode: ForwardMode,
    rows: list[int],
    counts: list[int],
    prefixes: list[int],
    mask: torch.Tensor | None = None,
) -> ForwardBatch:
    """A ForwardBatch as SGLang builds it: verify leaves the drafts out of ``seq_lens``, the others count them."""
    verify = mode == ForwardMode.TARGET_VERIFY
    seq_lens = torch.tensor([p if verify else p + c for p, c in zip(prefixes, counts, strict=True)])
    n_tokens = sum(counts)
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=len(rows),
        input_ids=torch.zeros(n_tokens, dtype=torch.long),
        req_pool_indices=torch.tensor(rows),
        seq_lens=seq_lens,
        out_cache_loc=torch.zeros(n_tokens, dtype=torch.long),
        seq_lens_sum=int(seq_lens.sum()),
    )
    if verify:
        batch.spec_info = SimpleNamespace(draft_token_num=counts[0], custom_mask=mask)
    elif mode == ForwardMode.EXTEND:
        batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = counts, prefixes
    return batch


def attend(world: World, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    backend = world.backend()
    backend.init_forward_metadata(batch)
    return backend.forward(q, None, None, world.layer, batch, save_kv_cache=False)


def random_queries(world: World, tokens: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    width = world.layer.tp_q_head_num * world.layer.qk_head_dim
    return torch.randn(tokens, width, generator=generator).to(world.dtype)


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
        token_to_kv_pool=world.pool, req_to_token_pool=SimpleNamespace(req_to_token=torch.empty(0, 0))
    )
    backend = PortableCpuAttnBackend(runner, other)
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


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 150), st.integers(0, 3000)), min_size=1, max_size=6),
    kv_heads=st.integers(1, 4),
    group=st.sampled_from([1, 3, 8, 64]),
    window=st.sampled_from([-1, 0, 500]),
    threads=st.sampled_from([1, 2, 16]),
)
def test_plan_covers_every_key_once(requests, kv_heads, group, window, threads):
    counts, prefixes = [c for c, _ in requests], [p for _, p in requests]
    firsts = [sum(counts[:b]) for b in range(len(counts))]
    plan = make_plan(
        Queries(row=firsts, first_token=firsts, count=counts, prefix=prefixes),
        kv_heads,
        group,
        window,
        threads,
    )
    assert plan.chunks[0] == 0 and plan.chunks[-1] == len(plan.parts) and (np.diff(plan.chunks) > 0).all()
    merged = {int(first + i) for first, n in plan.merges for i in range(n)}
    assert merged == {i for i, part in enumerate(plan.parts) if part[layout.P_PARTIAL] >= 0}
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for part in plan.parts:
        assert 0 < part[layout.P_NQ] * group <= layout.MAX_ROWS
        for i in range(part[layout.P_NQ]):
            spans.setdefault((int(part[layout.P_TOKEN] + i), int(part[layout.P_HEAD])), []).append(
                (int(part[layout.P_LO]), int(part[layout.P_HI]))
            )
    for b, (count, prefix) in enumerate(requests):
        for i in range(count):
            for head in range(kv_heads):
                pieces = spans.pop((firsts[b] + i, head))
                assert all(left[1] == right[0] for left, right in pairwise(pieces))
                low = max(0, prefix + i - window) if window >= 0 else 0
                assert pieces[0][0] <= low and pieces[-1][1] > prefix + i
    assert not spans


def test_work_is_balanced_over_threads():
    queries = Queries(row=[0], first_token=[0], count=[1], prefix=[6999])
    plan = make_plan(queries, kv_heads=3, group=3, window=-1, threads=2)
    work = plan.parts[:, layout.P_HI] - plan.parts[:, layout.P_LO]
    per_chunk = np.add.reduceat(work, plan.chunks[:-1])
    assert len(per_chunk) >= 6 and per_chunk.max() <= 1.2 * per_chunk.mean()


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
