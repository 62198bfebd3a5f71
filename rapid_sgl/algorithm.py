"""The RAPID algorithm as SGLang sees it: registration, server-argument checks, contract methods."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from rapid_sgl.config import AUTO, RapidConfig, RapidOptionError, env_name

logger = logging.getLogger(__name__)

NAME = "RAPID"
# SGLang's own default for speculative algorithms; each running request holds verify slots.
MAX_RUNNING_REQUESTS = 48


class RapidAlgorithm(CustomSpecAlgo):
    """``CustomSpecAlgo`` plus the methods that the scheduler calls and the base class lacks."""

    def create_worker(self, server_args: Any) -> type:
        return self.factory(server_args)

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> FutureMap:
        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def has_draft_kv(self) -> bool:
        # Drafts are written into the slots that the verify pass fills anyway.
        return False


def register() -> None:
    """Register RAPID with ``SpeculativeAlgorithm`` (SGLang's ``spec_registry``)."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    SpeculativeAlgorithm.register(
        NAME,
        supports_overlap=False,
        validate_server_args=validate_server_args,
        spec_class=RapidAlgorithm,
    )(_worker_class)


def _worker_class(server_args: Any) -> type:
    from rapid_sgl.worker import RapidWorker

    return RapidWorker


def server_defaults() -> RapidConfig:
    """The server's config: ``RapidConfig.from_env``, without draft KV where nobody would use it.

    Host memory is taken only as it is written to, so a CPU server can always re-encode. On other devices
    the memory is set apart when re-encoding is the default, a draft model is given, or the size was.
    """
    from sglang.srt.runtime_context import get_device, get_spec

    config = RapidConfig.from_env()
    asked = config.drafter in ("rag", "auto") or env_name("draft_tokens") in os.environ
    if asked or get_spec().speculative_draft_model_path or get_device().device == "cpu":
        return config
    return replace(config, draft_tokens=0)


def validate_server_args(server_args: Any) -> None:
    """Check what RAPID cannot serve and fill in what it needs.

    Raises:
        ValueError: a server option conflicts with RAPID; the text names it and the fix.
    """
    from rapid_sgl.auto import check_auto

    config = RapidConfig.from_env()
    check_auto(config)
    for flag, value, fix in (
        ("--page-size", (server_args.page_size or 1) > 1, "use --page-size 1: draft rows pick single tokens"),
        ("--enable-dp-attention", server_args.enable_dp_attention, "serve replicas with --dp-size instead"),
        ("--pp-size", server_args.pp_size > 1, "use tensor parallelism"),
    ):
        if value:
            raise ValueError(f"{flag} is not supported with --speculative-algorithm {NAME}; {fix}")
    if server_args.speculative_num_draft_tokens is None:
        server_args.speculative_num_draft_tokens = config.reserved_length + 1
    reserved = server_args.speculative_num_draft_tokens - 1
    if config.draft_length != AUTO and int(config.draft_length) > reserved:
        raise RapidOptionError(
            f"rapid_draft_length={config.draft_length} needs --speculative-num-draft-tokens "
            f"{int(config.draft_length) + 1} or more, got {reserved + 1}"
        )
    if server_args.speculative_draft_model_path:
        _check_draft_model(server_args, config)
    server_args.speculative_num_steps = reserved
    server_args.speculative_eagle_topk = 1
    server_args.disable_overlap_schedule = True
    server_args.enable_mixed_chunk = False
    if server_args.max_running_requests is None:
        server_args.max_running_requests = MAX_RUNNING_REQUESTS


def _check_draft_model(server_args: Any, config: RapidConfig) -> None:
    from rapid_sgl.drafter.draft_model import check_draft_model

    if config.draft_tokens == 0:
        raise RapidOptionError(
            "--speculative-draft-model-path needs KV memory for draft prompts, but --rapid-draft-tokens is 0; "
            "drop that flag or raise it"
        )
    check_draft_model(
        server_args.speculative_draft_model_path,
        server_args.tokenizer_path or server_args.model_path,
        trust_remote_code=server_args.trust_remote_code,
    )
