"""HeadMajorKVPool behaves like SGLang's pool and lies head-first in memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool

from rapid_sgl.platform.kv_pool import HeadMajorKVPool

COMMON = dict(
    size=50, page_size=1, head_num=3, head_dim=16, layer_num=2, device="cpu", enable_memory_saver=False
)


def make(cls=HeadMajorKVPool, **changes):
    return cls(**{**COMMON, "dtype": torch.float32, **changes})


def fill(*pools):
    for layer in range(2):
        for name in ("k_buffer", "v_buffer"):
            values = torch.randn(getattr(pools[0], name)[layer].shape)
            for pool in pools:
                getattr(pool, name)[layer].copy_(values)


def assert_same(left, right):
    for layer in range(2):
        for a, b in zip(left.get_kv_buffer(layer), right.get_kv_buffer(layer), strict=True):
            assert torch.equal(a, b)


def test_heads_are_contiguous_behind_the_slot_view():
    pool = make(v_head_dim=8)
    k, v = pool.get_kv_buffer(1)
    assert k.shape == (51, 3, 16) and v.shape == (51, 3, 8)
    assert k[:, 1].is_contiguous() and v[:, 2].is_contiguous()
    assert pool.get_kv_size_bytes() == make(MHATokenToKVPool, v_head_dim=8).get_kv_size_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrap", [KVWriteLoc, lambda loc: loc], ids=["write loc", "bare"])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_set_kv_buffer_equals_sglangs_pool(dtype, wrap, tokens):
    ours, theirs = make(dtype=dtype, start_layer=4), make(MHATokenToKVPool, dtype=dtype, start_layer=4)
    loc = torch.randperm(51)[:tokens]
    # as a model hands them over: strided slices of one fused projection, in the compute type
    k, v = torch.randn(tokens, 6, 16).split(3, dim=1)
    for pool in (ours, theirs):
        pool.set_kv_buffer(SimpleNamespace(layer_id=5), wrap(loc), k.clone(), v.clone())
    for ours_layer, theirs_layer in zip(
        ours.k_buffer + ours.v_buffer, theirs.k_buffer + theirs.v_buffer, strict=True
    ):
        assert torch.equal(ours_layer, theirs_layer)
    assert torch.equal(ours.get_key_buffer(5)[loc], k.to(dtype))


def test_move_kv_cache_with_overlap():
    pool = make(enable_kv_cache_copy=True)
    fill(pool)
    before = [b.clone() for b in pool.k_buffer + pool.v_buffer]
    target, source = torch.tensor([5, 6, 7, 8]), torch.tensor([4, 5, 6, 30])
    pool.move_kv_cache(target, source)
    for now, old in zip(pool.k_buffer + pool.v_buffer, before, strict=True):
        old[target] = old[source].clone()
        assert torch.equal(now, old)
    pool.move_kv_cache(target[:0], source[:0])
    assert torch.equal(pool.k_buffer[0], before[0])


def test_cpu_copy_round_trip_to_other_slots():
    pool, plain = make(), make(MHATokenToKVPool)
    pool.cpu_offloading_chunk_size = plain.cpu_offloading_chunk_size = 7
    fill(pool, plain)
    source, target = torch.randperm(51)[:20], torch.randperm(51)[:20]
    for each in (pool, plain):
        saved = each.get_cpu_copy(source)
        for buffer in each.k_buffer + each.v_buffer:
            buffer.zero_()
        each.load_cpu_copy(saved, target)
    assert_same(pool, plain)
    assert pool.k_buffer[0].abs().sum() > 0


def test_memory_is_not_touched_before_use():
    def resident_kib():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4

    before = resident_kib()
    pool = make(size=400_000, head_dim=64)  # 1.2 GiB
    assert sum(pool.get_kv_size_bytes()) > 1 << 30
    assert resident_kib() - before < 100_000


def test_unsupported_storage_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="float8_e5m2 is not supported"):
        make(dtype=torch.float8_e5m2)
    with pytest.raises(NotImplementedError, match="disaggregation"):
        make().get_contiguous_buf_infos()
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    with pytest.raises(ValueError, match="SGLANG_USE_HND_KVCACHE"):
        make()
