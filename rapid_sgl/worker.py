"""RapidWorker: one decode step is draft, verify, commit.

SGLang's scheduler drives it through the spec V2 schema (``BaseSpecWorker``); prefill and
sampling of a request's first token stay with SGLang's own worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from rapid_sgl.algorithm import server_defaults
from rapid_sgl.control.pace import Pace
from rapid_sgl.control.plan import Plan
from rapid_sgl.control.ranks import Ranks
from rapid_sgl.drafter.build import DraftSide
from rapid_sgl.drafter.rag import Drafts
from rapid_sgl.drafter.reencoded import ReencodedRow
from rapid_sgl.metrics import step_metrics
from rapid_sgl.offers import Offers, collect, fixed_length
from rapid_sgl.server_patches import kv_release
from rapid_sgl.state import RequestState, RequestTable
from rapid_sgl.stats import Step, StepStats
from rapid_sgl.trace import trace_batch
from rapid_sgl.verify.inputs import RapidDraftInput, generated, verify_input, verify_tokens
from rapid_sgl.verify.law import Law, LawRow, verify_chain
from rapid_sgl.verify.noise import uniforms
from rapid_sgl.verify.rules import LogitRules

logger = logging.getLogger(__name__)

# independent random numbers per token position
ACCEPT, RESAMPLE, DRAFT, STREAMS = 0, 1, 2, 3


class RapidWorker(BaseSpecWorker):
    """Draft with the served model over short rows, verify with the full context.

    Args:
        server_args, gpu_id, nccl_port: as SGLang passes them to every speculative worker.
        target_worker: SGLang's ``TpModelWorker`` of the served model.

    Raises:
        RapidOptionError: a ``RAPID_SGL_*`` variable is wrong.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any):
        super().__init__()
        self._target_worker = target_worker
        self.runner = target_worker.model_runner
        self.config = server_defaults()
        self.speculative_num_draft_tokens = get_spec().speculative_num_draft_tokens
        self.stats = StepStats()
        self.metrics = step_metrics()
        self.pace = Pace(self.speculative_num_draft_tokens - 1)
        # On a CPU the processes that bring the first token to the client share the cores with the next step.
        self._short_first_step = self.runner.device == "cpu"
        self._ranks = Ranks(get_parallel().tp_group)
        self._law = Law.from_rows([])  # of the latest step, and what it was made of
        self._law_rows: list[LawRow] = []
        self.side = DraftSide(server_args, gpu_id, nccl_port, target_worker, self.config)
        logger.info("RAPID defaults: %s", self.config)

    @property
    def draft_worker(self) -> None:
        """No worker that SGLang should drive: drafts run on the target's own weights, or on a model that
        ``DraftSide`` keeps with pools of its own."""
        return None

    @property
    def preloaded_weights_bytes(self) -> int:
        return self.side.preloaded_weights_bytes

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        return self.side.weight_updaters()

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        """Called by the scheduler once the target's pools exist."""
        self.side.alloc_memory_pool(req_to_token_pool)

    def init_attention_backends(self) -> None:
        """Called by the scheduler once the target's attention backend exists."""
        self.drafter = self.side.build_drafter()
        self.rows, self.reencoder = self.drafter.rows, self.drafter.reencoder
        self.requests = RequestTable(
            self.rows,
            self.reencoder,
            self.config,
            self.speculative_num_draft_tokens - 1,
            self.side.abilities(),
            self.metrics,
        )
        kv_release.listeners.append(self.requests.release)

    def init_cuda_graphs(self) -> None:
        """Draft passes run eagerly."""

    def clear_cache_pool(self) -> None:
        """``/flush_cache``: SGLang flushes only when no request runs, so nothing here is in use."""
        self.requests.clear()
        if self.reencoder is not None:
            self.reencoder.space.clear()

    def report(self) -> dict[str, Any]:
        """Statistics for ``/server_info``: options, step totals, undrafted requests by reason."""
        return {
            "config": vars(self.config),
            **self.stats.snapshot(),
            "pace": self.pace.snapshot(),
            "undrafted": dict(self.requests.undrafted),
            "running": len(self.requests),
            "reselections": self.requests.reselections,
            "draft_kv": self.reencoder.snapshot() if self.reencoder else None,
        }

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """Run one batch: prefill as SGLang does, or one draft-verify-commit step."""
        if not batch.forward_mode.is_decode():
            return self._prefill(batch, on_publish)
        with self.stats.step() as step:
            states = [self.requests.get(req) for req in batch.reqs]
            law = self._law_of(states, batch.seq_lens.device)
            rules = LogitRules(batch, [state.penalties for state in states])
            with step.timed("encode"):
                self._encode(batch, states)
                self._reselect(batch, states)
            offers = collect(
                batch,
                states,
                self.reencoder,
                self.pace.length,
                short_first_step=self._short_first_step,
                wait=self._ranks.several,
            )
            plan = self.pace.plan(offers.candidates)
            noise = self._noise(batch, states, plan.longest) if law.any_sampled else None
            with step.timed("draft"):
                drafts = self._draft(batch, states, offers, plan, law, rules, noise)
            tokens = verify_tokens(batch, drafts.chains)
            with step.timed("verify"):
                output = self._target_logits(batch, tokens)
            rules.apply_to_target_(output.next_token_logits, tokens)
            verdict = verify_chain(
                output.next_token_logits.view(*tokens.shape, -1),
                drafts.w,
                drafts.q,
                tokens[:, 1:],
                torch.tensor([len(chain) for chain in drafts.chains], device=tokens.device),
                law,
                None if noise is None else noise[:, : tokens.shape[1], [ACCEPT, RESAMPLE]],
                generated(batch) if law.any_fading else None,
            )
            trace_batch(
                [state.trace for state in states],
                [len(req.output_ids) for req in batch.reqs],
                plan.copied,
                output.next_token_logits.view(*tokens.shape, -1),
                drafts,
                verdict,
                law,
            )
            result = self._commit(batch, output, verdict.tokens, verdict.accept_lens + 1, on_publish)
            accepted = verdict.accept_lens.tolist()
            step.count(drafts.chains, accepted, plan.copied)
        self._learn(offers, plan, drafts, accepted, step)
        return result

    def _learn(self, offers: Offers, plan: Plan, drafts: Drafts, accepted: list[int], step: Step) -> None:
        """Costs and acceptance for the next plans, and the metrics."""
        passes, draft_s, other_s, gap_s = self._ranks.agreed(drafts.passes, step)
        self.pace.observe(
            offers.candidates,
            plan,
            replace(drafts, passes=passes),
            accepted,
            draft_s=draft_s,
            other_s=other_s,
            gap_s=gap_s,
        )
        if self.metrics is not None:
            self.metrics.step(
                step, self.pace.decision, self.reencoder.space.snapshot() if self.reencoder else None
            )

    def _prefill(
        self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None
    ) -> GenerationBatchResult:
        if batch.sampling_info is not None and not batch.sampling_info.is_all_greedy:
            _seed_first_token(batch)
        result = self.target_worker.forward_batch_generation(batch)
        result.new_seq_lens = batch.seq_lens.clone()
        result.accept_lens = torch.ones(len(batch.reqs), dtype=torch.int32, device=batch.seq_lens.device)
        result.next_draft_input = RapidDraftInput()
        result.speculative_num_draft_tokens = 1
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        return result

    def _law_of(self, states: Sequence[RequestState], device: torch.device) -> Law:
        """Entries of the batch's requests; most steps have the requests of the step before."""
        rows = [state.law for state in states]
        if rows != self._law_rows:
            self._law_rows, self._law = rows, Law.from_rows(rows, device=device)
        return self._law

    def _noise(self, batch: Any, states: list[RequestState], width: int) -> torch.Tensor:
        """Uniforms float64 [bs, width + 1, STREAMS] of the positions that this step may fill."""
        seeds = torch.tensor(
            [state.seed for state in states], dtype=torch.int64, device=batch.seq_lens.device
        )
        return uniforms(seeds, batch.seq_lens.long(), width + 1, STREAMS)

    def _draft(
        self,
        batch: Any,
        states: list[RequestState],
        offers: Offers,
        plan: Plan,
        law: Law,
        rules: LogitRules,
        noise: torch.Tensor | None,
    ) -> Drafts:
        if not plan.longest:
            vocab, device = self.runner.model_config.vocab_size, batch.seq_lens.device
            empty = torch.empty(len(states), 0, vocab, device=device)
            nothing: list[list] = [[] for _ in states]
            return Drafts(nothing, w=empty, q=empty, passes=[], confidence=nothing)
        copies = [tokens[:count] for tokens, count in zip(offers.copies, plan.copied, strict=True)]
        return self.drafter.draft(
            batch,
            [state.row for state in states],
            plan.model,
            copies,
            law,
            rules,
            None if noise is None else noise[:, : plan.longest, DRAFT],
            self.pace.stop(offers.candidates, plan),
            keep_q=any(state.trace is not None for state in states),
        )

    def _encode(self, batch: Any, states: list[RequestState]) -> None:
        """Prefill draft prompts, a little in every step, so that running requests keep their pace."""
        if self.reencoder is not None:
            self.reencoder.advance(
                [
                    (state.row, req.output_ids)
                    for req, state in zip(batch.reqs, states, strict=True)
                    if isinstance(state.row, ReencodedRow) and state.needs_row(req)
                ]
            )

    def _reselect(self, batch: Any, states: list[RequestState]) -> None:
        """Other spans for the views of long answers; where drafts must not depend on time, without delay."""
        for req, state in zip(batch.reqs, states, strict=True):
            if state.reselection is not None:
                wait = self._ranks.several or fixed_length(req, state) is not None
                self.requests.reselect(req, state, wait=wait)

    def _target_logits(self, batch: Any, tokens: torch.Tensor) -> Any:
        """The verify pass: target logits for every token of every chain (``LogitsProcessorOutput``)."""
        batch.spec_info = verify_input(self.runner, batch, tokens)
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = tokens.flatten()
        positions = batch.seq_lens[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        batch.out_cache_loc = (
            self.rows.target[batch.req_pool_indices[:, None], positions].flatten().to(torch.int64)
        )
        result = self.target_worker.forward_batch_generation(batch, is_verify=True)
        batch.forward_mode = ForwardMode.DECODE
        return result.logits_output

    def _commit(
        self,
        batch: Any,
        output: Any,
        tokens: torch.Tensor,
        accept_lens: torch.Tensor,
        on_publish: Callable[[torch.Tensor], None] | None,
    ) -> GenerationBatchResult:
        """Hand ``tokens`` [bs, width] and ``accept_lens`` [bs] (bonus included) to the scheduler."""
        new_seq_lens = batch.seq_lens + accept_lens
        if batch.return_logprob:
            compute_spec_logprobs(batch, output, tokens.flatten(), chain_stride=tokens.shape[1])
        if on_publish is not None:
            on_publish(new_seq_lens)
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=tokens.flatten(),
            accept_lens=accept_lens.to(torch.int32),
            new_seq_lens=new_seq_lens,
            next_draft_input=RapidDraftInput(),
            speculative_num_draft_tokens=tokens.shape[1],
        )


def _seed_first_token(batch: Any) -> None:
    """Let SGLang's own seeded sampler draw the first token where a request of the batch gave a seed."""
    seeds = [req.sampling_params.sampling_seed for req in batch.reqs]
    if all(seed is None for seed in seeds) or batch.sampling_info.sampling_seed is not None:
        return
    fresh = torch.randint(2**31, (len(seeds),)).tolist()
    chosen = [given if given is not None else drawn for given, drawn in zip(seeds, fresh, strict=True)]
    batch.sampling_info.sampling_seed = torch.tensor(chosen, dtype=torch.int64, device=batch.seq_lens.device)
