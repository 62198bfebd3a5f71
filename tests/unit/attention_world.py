"""A KV pool, a row table, one layer, and explicit float64 attention over them: what the attention tests compare with."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from rapid_sgl.platform.attention import PortableCpuAttnBackend
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
