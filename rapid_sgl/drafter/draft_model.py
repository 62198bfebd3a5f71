"""A separate draft model (``--speculative-draft-model-path``): checks at start-up, weights, and pools of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rapid_sgl.drafter.space import DraftSpace


def check_draft_model(draft_path: str, tokenizer_path: str, *, trust_remote_code: bool = False) -> None:
    """Refuse a draft model that does not speak the target's tokens.

    Args:
        draft_path: folder or hub id of the draft model.
        tokenizer_path: of the target.

    Raises:
        ValueError: no tokenizer can be loaded from ``draft_path``, or its vocabulary differs.
    """
    from transformers import AutoTokenizer

    flag = f"--speculative-draft-model-path {draft_path}"
    if draft_path.startswith((".", "/", "~")) and not Path(draft_path).expanduser().is_dir():
        raise ValueError(f"{flag}: there is no such folder; give a model folder or a hub id")
    try:
        draft = AutoTokenizer.from_pretrained(draft_path, trust_remote_code=trust_remote_code).get_vocab()
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{flag}: its tokenizer, which must be the target's, cannot be loaded ({first_line})"
        ) from error
    target = AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=trust_remote_code).get_vocab()
    different = [token for token, index in target.items() if draft.get(token) != index]
    different += [token for token in draft if token not in target]
    if different:
        raise ValueError(
            f"{flag}: its vocabulary ({len(draft)} tokens) is not the target's ({len(target)}): "
            f"{len(different)} differ, for example {different[0]!r}; use a draft model of the same family"
        )


def load_draft_model(server_args: Any, gpu_id: int, nccl_port: int) -> Any:
    """A ``TpModelWorker`` with the draft model's weights and no pools yet."""
    from sglang.srt.managers.tp_worker import TpModelWorker

    return TpModelWorker(server_args=server_args, gpu_id=gpu_id, nccl_port=nccl_port, is_draft_worker=True)


def separate_space(draft_model: Any, target_runner: Any, tokens: int) -> DraftSpace:
    """Pools of the draft model's own shape for ``tokens`` tokens."""
    config = replace(target_runner.memory_pool_config, max_total_num_tokens=tokens)
    draft_model.alloc_memory_pool(config)
    runner = draft_model.model_runner
    return DraftSpace(runner.req_to_token_pool, runner.token_to_kv_pool, runner.token_to_kv_pool_allocator)
