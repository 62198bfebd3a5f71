"""Where drafting over a view would pay on a GPU: computed from shapes, bandwidth and arithmetic rate, nothing measured.

    python tests/measure/roofline.py

A pass takes the longer of the time to read weights and KV once and the time of its arithmetic. Drafts are accepted
independently with one probability; the chain length is the best of 0 to 10.
"""

from __future__ import annotations

from dataclasses import dataclass

ACCEPT = 0.8  # per draft; the paper reports 0.75 to 0.85
ROW = 4096  # tokens in a draft row
BATCHES = (1, 8, 32)
CONTEXTS = (4_000, 8_000, 32_000, 128_000)


@dataclass(frozen=True)
class Model:
    name: str
    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128

    def kv_bytes(self, tokens: int) -> float:
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim * tokens

    def flops(self, queries: int, context: int) -> float:
        return queries * (2 * self.parameters + 4 * self.layers * self.heads * self.head_dim * context)


MODELS = (Model("Llama-3.1-8B", 8.03e9, 32, 32, 8), Model("Llama-3.1-70B", 70.6e9, 80, 64, 8))
GPU_BYTES_PER_S, GPU_FLOPS_PER_S, GPU_MEMORY = 4.8e12, 989e12, 141e9  # H200, bf16


@dataclass(frozen=True)
class Drafter:
    name: str
    model: Model
    bytes_per_weight: float
    extra: bool  # weights besides the target's


def drafters(model: Model) -> list[Drafter]:
    found = [Drafter("same weights", model, 2, False)]
    found += [Drafter(f"int{bits} twin", model, bits / 8, True) for bits in (8, 4)]
    return found if model is MODELS[0] else [*found, Drafter(MODELS[0].name, MODELS[0], 2, True)]


def seconds(
    model: Model, gpus: int, batch: int, queries: int, context: int, bytes_per_weight: float
) -> float:
    """One pass of ``queries`` tokens per request over ``context`` cached ones."""
    read = model.parameters * bytes_per_weight + batch * model.kv_bytes(context)
    return max(read / GPU_BYTES_PER_S, batch * model.flops(queries, context) / GPU_FLOPS_PER_S) / gpus


def speedup(model: Model, gpus: int, batch: int, context: int, drafter: Drafter) -> tuple[float, int]:
    """(best speedup over plain decoding, its chain length)."""
    plain = seconds(model, gpus, batch, 1, context, 2)
    draft = seconds(drafter.model, gpus, batch, 1, min(ROW, context), drafter.bytes_per_weight)
    best = (1.0, 0)
    for length in range(1, 11):
        tokens = (1 - ACCEPT ** (length + 1)) / (1 - ACCEPT)
        step = length * draft + seconds(model, gpus, batch, length + 1, context, 2)
        best = max(best, (tokens * plain / step, length))
    return best


def cell(model: Model, gpus: int, batch: int, context: int, drafter: Drafter) -> str:
    needed = model.parameters * 2 + batch * model.kv_bytes(context)
    needed += drafter.extra * drafter.model.parameters * drafter.bytes_per_weight
    if needed > gpus * GPU_MEMORY:
        return "does not fit"
    value, length = speedup(model, gpus, batch, context, drafter)
    return f"{value:.2f} (γ {length})" if length else "1.00 (none)"


def main() -> None:
    print("| model | drafter | batch | " + " | ".join(f"{c // 1000}K" for c in CONTEXTS) + " |")
    print("|---" * (3 + len(CONTEXTS)) + "|")
    for model, gpus in zip(MODELS, (1, 4), strict=True):
        for drafter in drafters(model):
            for batch in BATCHES:
                row = [cell(model, gpus, batch, context, drafter) for context in CONTEXTS]
                print(f"| {model.name}, {gpus} x H200 | {drafter.name} | {batch} | " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
