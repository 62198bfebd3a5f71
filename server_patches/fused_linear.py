"""Linear layers and the LM head on the portable CPU platform: one pass over the weights for a few rows.

See ``LEDGER.md`` for why, how and when this can go.
"""

from __future__ import annotations

LINEAR_TARGET = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"
HEAD_TARGET = "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head"


def register() -> None:
    """AROUND hooks where the portable CPU platform serves; elsewhere SGLang's own kernels run."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from rapid_sgl.platform import ops
    from rapid_sgl.platform.detect import portable_cpu_wanted

    if portable_cpu_wanted():
        HookRegistry.register(LINEAR_TARGET, ops.linear_apply, HookType.AROUND)
        HookRegistry.register(HEAD_TARGET, ops.lm_head_logits, HookType.AROUND)
