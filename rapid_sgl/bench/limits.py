"""Which cells a server can take, and how much KV memory they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rapid_sgl.bench import DRAFTING, BenchError
from rapid_sgl.config import RapidConfig

if TYPE_CHECKING:
    from rapid_sgl.bench.runner import Side

# The server's totals are read while the batch is still decoding; this many more steps cover the reading.
SNAPSHOT_STEPS = 3
SPECULATING = (*DRAFTING, "ngram", "standalone")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Sizes:
    """How long answers are and how they are drafted."""

    new_tokens: int  # tokens per request inside the window
    config: RapidConfig  # draft length, budget and windows of the drafting methods

    def max_new_tokens(self, method: str) -> int:
        """Tokens to ask for, so that nobody finishes while the server's totals are being read."""
        per_step = self.config.reserved_length + 1 if method in SPECULATING else 1
        return self.new_tokens + SNAPSHOT_STEPS * per_step


def kv_slots(method: str, context: int, batch: int, sizes: Sizes) -> int:
    """KV slots that a cell needs at its fullest."""
    verifying = 2 * (sizes.config.reserved_length + 1)  # reserved by SGLang for two steps ahead
    prompt = min(context, sizes.config.budget) if method == "rag-only" else context
    return batch * (prompt + sizes.max_new_tokens(method) + verifying)


def check_fits(side: Side, context: int, batch: int, sizes: Sizes) -> None:
    """Refuse a cell that the server would reject or queue.

    Raises:
        BenchError: naming the limit and the flag that changes it.
    """
    raw, answer = side.info.raw, sizes.max_new_tokens(side.method)
    room = side.info.max_prompt_tokens(answer)
    if context > room:
        raise BenchError(
            f"context {context} with {answer} new tokens is more than the server takes: "
            f"prompts may have {room} tokens; use shorter contexts or a model with a longer one "
            "(`--rope-scale` makes one of the embedded model)"
        )
    running = raw.get("max_running_requests")
    if running and batch > running:
        raise BenchError(
            f"batch {batch} exceeds the server's {running} running requests; "
            "use a smaller --batch or start the server with a larger --max-running-requests"
        )
    slots = kv_slots(side.method, context, batch, sizes)
    pool = raw.get("max_total_num_tokens")
    if pool and slots > pool:
        raise BenchError(
            f"{batch} requests of {context} tokens need {slots} KV slots, the server has {pool}; "
            f"start it with --max-total-tokens {slots} or more"
        )


def kv_token_bytes(model_path: str, dtype: str) -> int | None:
    """Bytes of one token's keys and values in all layers; None for a model whose configuration does not tell."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path).get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    layers = getattr(config, "num_hidden_layers", None)
    if not heads or not layers or dtype not in DTYPE_BYTES:
        return None
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return 2 * layers * kv_heads * width * DTYPE_BYTES[dtype]


def kv_mb(
    method: str, context: int, batch: int, sizes: Sizes, token_bytes: int | None, draft_bytes: int | None
) -> float | None:
    """KV memory of a cell at its fullest, in MB of 10^6 bytes: what the target holds, and what drafts need besides.

    Views and copies need nothing; ``rag`` holds a short prompt and the answer a second time, ``standalone``
    everything.
    """
    if token_bytes is None:
        return None
    slots = kv_slots(method, context, batch, sizes)
    extra = 0
    if method == "standalone":
        extra = slots
    elif method == "rag" and context > sizes.config.budget:
        extra = batch * (sizes.config.budget + sizes.max_new_tokens(method))
    return (slots * token_bytes + extra * (draft_bytes or token_bytes)) / 1e6
