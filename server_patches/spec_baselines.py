"""SGLang's own NGRAM and STANDALONE on the portable CPU platform: torch in place of their CUDA and Triton kernels.

``rapid-sgl bench`` measures them beside RAPID. See ``LEDGER.md`` for why, how and when this can go.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rapid_sgl.platform import spec_ops

OPS = "sglang.kernels.ops.speculative"
EXTEND_TARGET = f"{OPS}.cache_locs.assign_extend_cache_locs_func"
FRONT_TARGET = f"{OPS}.cache_locs.fill_front_out_cache_loc_func"
DRAFT_TARGET = f"{OPS}.cache_locs.assign_draft_cache_locs_contiguous_func"
BUILD_TARGET = f"{OPS}.spec_tree.build_tree_kernel_efficient_func"
VERIFY_TARGET = f"{OPS}.spec_tree.verify_tree_greedy_func"
BONUS_TARGET = f"{OPS}.eagle.fill_bonus_tokens_func"
ACCEPT_TARGET = f"{OPS}.eagle.fill_accept_out_cache_loc_func"
BACKEND_TARGET = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"

REPLACED = {
    EXTEND_TARGET: spec_ops.extend_cache_locs,
    FRONT_TARGET: spec_ops.front_cache_locs,
    DRAFT_TARGET: spec_ops.draft_cache_locs,
    BUILD_TARGET: spec_ops.build_tree,
    VERIFY_TARGET: spec_ops.verify_tree_greedy,
    BONUS_TARGET: spec_ops.bonus_tokens,
    ACCEPT_TARGET: spec_ops.accept_out_cache_loc,
}
# Module of the kernel package that ``reconstruct_tree`` imports on any device but CUDA, ROCm and XPU.
KERNEL_MODULE = "sgl_kernel.speculative"
# Names that are None where SGLang has no kernel. A hook would replace every other None that a module holds.
ABSENT = {
    f"{OPS}.verify_sampling": {"tree_speculative_sampling_target_only": spec_ops.tree_sampling},
    "sglang.kernels.ops.sampling.renorm": {
        "top_k_renorm_prob": spec_ops.top_k_renorm,
        "top_p_renorm_prob": spec_ops.top_p_renorm,
    },
}


BORROWER = "sglang.srt.speculative.eagle_utils"


def provide_kernels() -> None:
    """Make the imports of SGLang's tree algorithms succeed, and fill in the kernels that it lacks here."""
    if KERNEL_MODULE not in sys.modules:
        module = ModuleType(KERNEL_MODULE, "Torch versions of the kernels that SGLang imports from here.")
        module.reconstruct_indices_from_tree_mask = spec_ops.reconstruct_indices_from_tree_mask  # type: ignore[attr-defined]
        sys.modules[KERNEL_MODULE] = module
    from importlib import import_module

    for path, names in ABSENT.items():
        # whoever was imported before this has the None by its own name
        for holder in (import_module(path), sys.modules.get(BORROWER)):
            for name, function in names.items():
                if getattr(holder, name, function) is None:
                    setattr(holder, name, function)


def create_backend(
    original: Callable[..., Any],
    factory: Any,
    backend_name: str,
    backend_map: dict[str, Callable[[], tuple[str, Any]]],
    error_template: str,
    stamps_children: bool = False,
) -> Any:
    """SGLang's choice of a draft worker's attention backends, with ours among them."""
    from rapid_sgl.platform.attention import PortableCpuAttnBackend
    from rapid_sgl.platform.cpu import ATTENTION_BACKEND
    from rapid_sgl.platform.draft_steps import ChainDraftBackend

    runner = factory.draft_model_runner

    def ours() -> tuple[str, Any]:
        if stamps_children:  # the backend of several decode steps, a container
            return ATTENTION_BACKEND, ChainDraftBackend(runner, factory.topk, factory.speculative_num_steps)
        return ATTENTION_BACKEND, PortableCpuAttnBackend(runner)

    known = {**backend_map, ATTENTION_BACKEND: ours}
    return original(factory, backend_name, known, error_template, stamps_children)


def register() -> None:
    """Hooks where the portable CPU platform serves; nothing elsewhere."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from rapid_sgl.platform.detect import portable_cpu_wanted

    if portable_cpu_wanted():
        provide_kernels()
        for target, function in REPLACED.items():
            HookRegistry.register(target, function, HookType.REPLACE)
        HookRegistry.register(BACKEND_TARGET, create_backend, HookType.AROUND)
