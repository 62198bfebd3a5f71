"""SGLang attention backend for CPUs without AMX kernels; registered as ``rapid_cpu``.

One kernel (``kernels.attend``) serves decode, verification (chain or tree), and extension over a cached prefix, in
float32 and bfloat16. Its work is proportional to queries x visible keys, it reads keys where they lie, and
it never repeats the KV heads of a group. The rows come from a row table that the constructor may replace: the
RAPID drafter runs a second instance over rows of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from rapid_sgl.platform.kernels_plan import Plan, Queries, make_plan
from rapid_sgl.platform.paged import PagedAttention
from rapid_sgl.platform.tape import Tape, empty


@dataclass
class _Forward:
    """What one forward needs; plans are made when the first layer of a shape asks for one."""

    queries: Queries
    n_tokens: int
    plans: dict[tuple[int, int, int], Plan] = field(default_factory=dict)

    def plan(self, kv_heads: int, group: int, window: int) -> Plan:
        key = (kv_heads, group, window)
        known = self.plans.get(key)
        if known is None:
            known = self.plans[key] = make_plan(self.queries, *key, torch.get_num_threads())
        return known


@dataclass(frozen=True)
class _LayerShape:
    """The checked attributes of a ``RadixAttention`` layer."""

    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    scale: float
    cap: float
    window: int


def _as_ints(values: Any) -> list[int]:
    return values.tolist() if isinstance(values, torch.Tensor) else [int(v) for v in values]


def _verify_counts(spec_info: Any, batch_size: int) -> list[int]:
    """Queries per request of a target-verify pass (``RaggedVerifyLayout`` where the algorithm makes one)."""
    layout = getattr(spec_info, "ragged_verify_layout", None)
    if layout is not None:
        return _as_ints(layout.verify_lens_cpu if layout.verify_lens_cpu is not None else layout.verify_lens)
    return [int(spec_info.draft_token_num)] * batch_size


def tree_masks(
    custom_mask: torch.Tensor, counts: list[int], prefixes: list[int]
) -> tuple[np.ndarray | None, list[int], list[int]]:
    """(mask bytes, offset per request, row stride per request) of a flattened tree mask; None where all are chains.

    Accepts SGLang's two layouts (``TreeMaskMode``): FULL_MASK, per request [q, prefix + q], possibly with
    unused bytes after the last; and QLEN_ONLY, per request [q, q]. Raises ValueError for any other length and for a
    FULL_MASK that hides part of the prefix.
    """
    flat = custom_mask.reshape(-1).to(torch.uint8).numpy()
    short = sum(q * q for q in counts)
    full = sum(q * (p + q) for q, p in zip(counts, prefixes, strict=True))
    if flat.size != short and flat.size < full:
        raise ValueError(
            f"tree mask has {flat.size} entries; {len(counts)} requests of {counts} queries over {prefixes} cached "
            f"tokens need {full} (with the prefix) or {short} (without)"
        )
    at, offsets, strides, chain = 0, [], [], True
    for q, p in zip(counts, prefixes, strict=True):
        prefix = 0 if flat.size == short else p
        rows = flat[at : at + q * (prefix + q)].reshape(q, prefix + q)
        if prefix and not rows[:, :prefix].all():
            raise ValueError(
                "tree mask hides cached tokens; the rapid_cpu backend supports masks among drafts only"
            )
        chain = chain and np.array_equal(rows[:, prefix:] != 0, np.tri(q, dtype=bool))
        offsets.append(at + prefix)
        strides.append(prefix + q)
        at += rows.size
    return (None, [], []) if chain else (flat, offsets, strides)


class PortableCpuAttnBackend(AttentionBackend):
    """Paged attention on torch's CPU device.

    Reads the runner's ``req_to_token`` table: int32 [rows, max_len], contiguous; the slot of every token of every row,
    indexed by ``forward_batch.req_pool_indices``. Raises ValueError for KV pools that it cannot read.
    """

    needs_cpu_seq_lens = True
    # read by rapid_sgl.verify.inputs: a chain is causal by itself here
    needs_chain_mask = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        if self.req_to_token.dtype != torch.int32 or not self.req_to_token.is_contiguous():
            raise ValueError(
                f"row table must be contiguous int32, got {self.req_to_token.dtype}; allocate it so"
            )
        if isinstance(self.token_to_kv_pool, SWAKVPool):
            raise ValueError(
                "sliding-window KV pools are not supported on rapid_cpu; add --disable-hybrid-swa-memory"
            )
        if self.token_to_kv_pool.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"KV cache dtype {self.token_to_kv_pool.dtype} is not supported on rapid_cpu; "
                "use --dtype float32 or bfloat16 and no --kv-cache-dtype"
            )
        self.forward_metadata: _Forward | None = None
        self._kernel = PagedAttention()
        self._layers: dict[int, _LayerShape] = {}

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan one forward on the host. Called once, before the first layer."""
        if forward_batch.encoder_lens is not None:
            raise NotImplementedError(
                "encoder-decoder models are not supported by the rapid_cpu attention backend"
            )
        mode = forward_batch.forward_mode
        seq_lens = _as_ints(forward_batch.seq_lens)
        mask: np.ndarray | None = None
        offsets: list[int] = []
        strides: list[int] = []
        if mode.is_decode_or_idle():
            counts = [1] * len(seq_lens)
            prefixes = [max(0, n - 1) for n in seq_lens]
        elif mode.is_target_verify():
            counts = _verify_counts(forward_batch.spec_info, len(seq_lens))
            prefixes = seq_lens
            custom_mask = getattr(forward_batch.spec_info, "custom_mask", None)
            if custom_mask is not None:
                mask, offsets, strides = tree_masks(custom_mask, counts, prefixes)
        else:
            counts = _as_ints(self._host(forward_batch, "extend_seq_lens"))
            prefixes = _as_ints(self._host(forward_batch, "extend_prefix_lens"))
        width = self.req_to_token.shape[1]
        queries = Queries(
            row=[r * width for r in _as_ints(forward_batch.req_pool_indices)],
            first_token=[0, *accumulate(counts)][:-1],
            count=counts,
            prefix=prefixes,
            mask=mask,
            mask_offset=offsets,
            mask_stride=strides,
        )
        self.forward_metadata = _Forward(queries, sum(counts))

    @staticmethod
    def _host(forward_batch: ForwardBatch, name: str) -> Any:
        on_host = getattr(forward_batch, f"{name}_cpu")
        return on_host if on_host is not None else getattr(forward_batch, name)

    def _shape(self, layer: RadixAttention) -> _LayerShape:
        """Check a layer once; raises NotImplementedError for kinds of attention that the kernel lacks."""
        known = self._layers.get(layer.layer_id)
        if known is not None:
            return known
        name = f"attention layer {layer.layer_id}"
        if layer.is_cross_attention or layer.attn_type == AttentionType.ENCODER_ONLY:
            raise NotImplementedError(
                f"{name} is not causal self-attention, the only kind that rapid_cpu serves"
            )
        if layer.xai_temperature_len > 0 or (layer.logit_cap > 0 and layer.logit_capping_method != "tanh"):
            raise NotImplementedError(f"{name} scales its logits in a way that rapid_cpu does not know")
        shape = _LayerShape(
            q_heads=layer.tp_q_head_num,
            kv_heads=layer.tp_k_head_num,
            qk_dim=layer.qk_head_dim,
            v_dim=layer.v_head_dim,
            scale=layer.scaling,
            cap=max(0.0, layer.logit_cap),
            window=layer.sliding_window_size if layer.sliding_window_size is not None else -1,
        )
        self._layers[layer.layer_id] = shape
        return shape

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **extra: Any,
    ) -> torch.Tensor:
        """Store k and v, then attend; returns [tokens, q_heads * v_dim] in q's dtype."""
        unknown = [name for name, value in extra.items() if value is not None]
        if unknown:
            raise NotImplementedError(f"rapid_cpu attention does not support {', '.join(unknown)}")
        forward = self.forward_metadata
        if forward is None:
            raise RuntimeError("init_forward_metadata must run before the first attention layer")
        shape = self._shape(layer)
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
        plan = forward.plan(shape.kv_heads, shape.q_heads // shape.kv_heads, shape.window)
        queries = q.reshape(-1, shape.q_heads, shape.qk_dim).to(torch.float32)
        # Tokens beyond the planned ones are padding: their rows stay zero.
        make = empty if queries.shape[0] == forward.n_tokens else torch.zeros
        out = make(queries.shape[0], shape.q_heads, shape.v_dim)
        pool = self.token_to_kv_pool
        self._kernel.run(
            plan,
            queries,
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            out,
            self.req_to_token,
            scale=shape.scale,
            cap=shape.cap,
            window=shape.window,
            mask=forward.queries.mask,
        )
        return out.view(-1, shape.q_heads * shape.v_dim).to(q.dtype)

    def planned_tokens(self) -> int:
        """Tokens of the forward that ``init_forward_metadata`` planned."""
        return self.forward_metadata.n_tokens if self.forward_metadata is not None else 0

    def set_tape(self, tape: Tape) -> None:
        """Point the attention launches of a recorded forward at the keys of the planned one."""
        forward = self.forward_metadata
        if forward is None:
            raise RuntimeError("init_forward_metadata must run before a forward is replayed")
        for (kv_heads, group, window, qk_dim, v_dim), rows in tape.tags.items():
            plan = forward.plan(kv_heads, group, window)
            self._kernel.retarget(tape, rows, plan, group, qk_dim, v_dim, forward.queries.mask)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):  # type: ignore[no-untyped-def]
        """One query per request."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):  # type: ignore[no-untyped-def]
        """Any number of queries per request: prefill, extension over a cached prefix, verification."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of a padding request."""
        return 1

    def support_triton(self) -> bool:
        return False
