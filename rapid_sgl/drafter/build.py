"""Build the draft side of a server: models, memory, attention backends."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.runtime_context import get_spec

from rapid_sgl.config import RapidConfig
from rapid_sgl.drafter.backend import RunnerOverRows, draft_attention_backend
from rapid_sgl.drafter.choice import Abilities
from rapid_sgl.drafter.draft_model import load_draft_model, separate_space
from rapid_sgl.drafter.passes import DraftPasses
from rapid_sgl.drafter.rag import RAGDrafter
from rapid_sgl.drafter.reencoded import Reencoder
from rapid_sgl.drafter.rows import DraftRows
from rapid_sgl.drafter.space import DraftSpace, same_weights_space
from rapid_sgl.drafter.twin import TwinUpdater, make_twin, twin_bytes

logger = logging.getLogger(__name__)


class DraftSide:
    """What drafts run on, built in the order in which SGLang's scheduler builds the target.

    Args:
        server_args, gpu_id, nccl_port, target_worker: as SGLang passes them to a speculative worker.
        config: the server's defaults.
    """

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any, config: RapidConfig
    ):
        self.runner = target_worker.model_runner
        self.config = config
        # before SGLang sizes the KV pool, so that it leaves room for the twin
        self.twin = make_twin(self.runner, config.drafter_weights)
        if self.twin is not self.runner.model:
            size = twin_bytes(self.twin, self.runner.model) / 1e6
            logger.info("quantised twin: %s, %.0f MB", config.drafter_weights, size)
        self.draft_model: Any = None  # TpModelWorker of a separate draft model
        if get_spec().speculative_draft_model_path:
            self.draft_model = load_draft_model(server_args, gpu_id, nccl_port)
        self.space: DraftSpace | None = None

    @property
    def preloaded_weights_bytes(self) -> int:
        return self.draft_model.preloaded_weights_bytes if self.draft_model else 0

    def abilities(self) -> Abilities:
        return Abilities(
            no_views=_why_no_views(self.runner),
            reencode=self.space is not None,
            draft_model=self.draft_model is not None,
        )

    def weight_updaters(self) -> list[tuple[str, Any]]:
        """(role, runner) pairs that SGLang's weight updates must reach besides the target's."""
        return [] if self.twin is self.runner.model else [("draft", TwinUpdater(self.twin, self.runner))]

    def alloc_memory_pool(self, req_to_token_pool: Any) -> None:
        """Rows for views, and where re-encoded rows are wanted, slots for them."""
        self.rows = DraftRows(req_to_token_pool.req_to_token)
        if not self.config.draft_tokens:
            return
        if self.draft_model:
            self.space = separate_space(self.draft_model, self.runner, self.config.draft_tokens)
        elif _why_no_reencoding(self.runner):
            logger.warning("no re-encoded drafts: %s", _why_no_reencoding(self.runner))
            return
        else:
            self.space = same_weights_space(self.runner, self.config.draft_tokens)
        if len(self.space.req_to_token) < len(req_to_token_pool.req_to_token):
            raise RuntimeError("the draft row table has fewer rows than the target's")
        logger.info("re-encoded draft rows: %d KV tokens", self.space.size)

    def build_drafter(self) -> RAGDrafter:
        """Backends over the rows; the target's own backend must exist."""
        context, vocab = self.runner.model_config.context_len, self.runner.model_config.vocab_size
        backend = draft_attention_backend(RunnerOverRows(self.runner, self.rows.req_to_token))
        views = {
            weights: DraftPasses(model, backend, context - 1, vocab)
            for weights, model in self._models().items()
        }
        return RAGDrafter(self.rows, views, self._reencoder(vocab), vocab)

    def _models(self) -> dict[str, torch.nn.Module]:
        """Models that share the target's layers and KV, by weights."""
        return {"same": self.runner.model, self.config.drafter_weights: self.twin}

    def _reencoder(self, vocab: int) -> Reencoder | None:
        space = self.space
        if space is None:
            return None
        runner, models = self.runner, self._models()
        if self.draft_model:
            runner = self.draft_model.model_runner
            models = dict.fromkeys(models, runner.model)
            # which backend decodes is resolved for the target's runner only
            runner.decode_attention_backend_str = self.runner.decode_attention_backend_str
        backend = draft_attention_backend(
            RunnerOverRows(runner, space.req_to_token, space.token_to_kv_pool, space.allocator)
        )
        context = runner.model_config.context_len
        passes = {
            weights: DraftPasses(model, backend, context - 1, vocab) for weights, model in models.items()
        }
        return Reencoder(space, passes, self.config.draft_prefill, context)


def _why_no_views(runner: Any) -> str:
    """Why KV of this model cannot be picked token by token; "" when it can."""
    if runner.is_hybrid_swa or runner.kv_cache_configurator.mambaish_config is not None:
        return "kv_not_per_token"
    if runner.model_config.model_is_mrope:
        return "mrope"
    return ""


def _why_no_reencoding(runner: Any) -> str:
    """Why the served model cannot prefill draft prompts beside the target's requests; "" when it can."""
    if runner.kv_cache_configurator.mambaish_config is not None:
        return "recurrent state is not kept per token"
    if runner.is_hybrid_swa:
        return "its KV pool has sliding-window parts; serve with --disable-hybrid-swa-memory"
    if runner.model_config.model_is_mrope:
        return "its positions are not plain numbers"
    return ""
