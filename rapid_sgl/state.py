"""What RAPID keeps of a running request: its options, its law, its seed and its draft row.

Keyed by request id, filled at the first decode step, released when SGLang releases the
request's KV row (finish, abort, retraction).
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rapid_sgl.config import RapidConfig
from rapid_sgl.control.step import RequestPace
from rapid_sgl.drafter.choice import Abilities, choose
from rapid_sgl.drafter.copies import CopySource
from rapid_sgl.drafter.rag import DraftRow
from rapid_sgl.drafter.reencoded import ReencodedRow, Reencoder
from rapid_sgl.drafter.reselect import Reselection, wants_reselection
from rapid_sgl.drafter.rows import DraftRows, View, tail_variants, view_ranges
from rapid_sgl.metrics import StepMetrics
from rapid_sgl.request import Limits, RequestOptions, parse_options
from rapid_sgl.trace import Record
from rapid_sgl.verify.law import LawRow, Residual, Schedule, Transfer
from rapid_sgl.verify.penalties import Penalties, penalties_of


@dataclass(frozen=True)
class RequestState:
    """One running request, as the worker sees it."""

    options: RequestOptions
    law: LawRow
    penalties: Penalties
    seed: int  # int64; of the request, or derived from its id
    row: DraftRow | None  # None: the request decodes without drafts
    drafter: str  # view, rag, copy or off
    reason: str  # why that drafter
    pace: RequestPace
    source: CopySource | None  # None: the request copies nothing
    trace: list[Record] | None  # of its tokens but the first; None: not asked for
    reselection: Reselection | None = None  # None: the row keeps its spans

    def is_first(self, req: Any) -> bool:
        """Whether the next step may go undrafted, because it is the first one and nothing is transferred."""
        return len(req.output_ids) == 1 and self.law.transfer is Transfer.NONE

    def needs_row(self, req: Any) -> bool:
        """Whether its draft prompt may be prefilled now.

        Not while it copies, which its first drafted step shows: a short answer may be over before it needs a row.
        """
        if self.source is None or self.law.transfer is not Transfer.NONE:
            return True
        return len(req.output_ids) > 2 and not self.pace.copying

    def meta_info(self, *, finished: bool) -> dict[str, Any]:
        """What the response's ``meta_info`` says of the request; its trace only when it has finished."""
        info: dict[str, Any] = {"rapid_drafter": self.drafter, "rapid_reason": self.reason}
        if self.source is not None:
            info["rapid_copied_tokens"] = self.pace.copied
        if self.reselection is not None:
            info["rapid_reselections"] = len(self.reselection.changes)
        if finished and self.trace is not None:
            info["rapid_trace"] = [list(record) for record in self.trace]
            if self.reselection is not None:
                info["rapid_reselected"] = self.reselection.history()
        if isinstance(self.row, ReencodedRow):
            info["rapid_draft_prompt_tokens"] = len(self.row.prompt)
            info["rapid_draft_cached_tokens"] = self.row.cached
        return info


class RequestTable:
    """States of the running requests.

    Args:
        rows: where views are built.
        reencoder: where re-encoded rows are; None without memory for them.
        defaults: the server's config.
        max_draft_length: drafts per step that verify slots are reserved for.
        abilities: what this server can draft with.
        metrics: told of undrafted requests, row build times and re-selections.
    """

    def __init__(
        self,
        rows: DraftRows,
        reencoder: Reencoder | None,
        defaults: RapidConfig,
        max_draft_length: int,
        abilities: Abilities,
        metrics: StepMetrics | None = None,
    ):
        self.rows, self.reencoder, self.defaults = rows, reencoder, defaults
        self.max_draft_length, self.abilities = max_draft_length, abilities
        self.metrics = metrics
        self.undrafted: Counter[str] = Counter()  # requests that are not drafted, by reason
        self.reselections = 0  # times that a view got other spans
        self._states: dict[str, RequestState] = {}
        self._indexing = ThreadPoolExecutor(1, "rapid-index")

    def __len__(self) -> int:
        return len(self._states)

    def get(self, req: Any) -> RequestState:
        """The state of a decoding request (SGLang's ``Req``); built when it is new or was moved to another row."""
        state = self._states.get(req.rid)
        if state is None or (state.row is not None and state.row.pool_idx != req.kv.req_pool_idx):
            self.release(req.rid)
            state = self._states[req.rid] = self._build(req)
            req.rapid_meta_info = state.meta_info
            if state.drafter == "off":
                self.undrafted[state.reason] += 1
                if self.metrics is not None:
                    self.metrics.undrafted(state.reason)
        return state

    def reselect(self, req: Any, state: RequestState, *, wait: bool) -> None:
        """Give the request's view other spans where that is due; ``wait`` as for ``Reselection.advance``."""
        if state.reselection is None or not isinstance(state.row, View):
            return
        if state.reselection.advance(self.rows, state.row, req.output_ids, wait=wait):
            self.reselections += 1
            if self.metrics is not None:
                self.metrics.reselection()

    def release(self, rid: str) -> None:
        state = self._states.pop(rid, None)
        if state is not None and isinstance(state.row, ReencodedRow) and self.reencoder is not None:
            self.reencoder.release(state.row)

    def clear(self) -> None:
        for rid in list(self._states):
            self.release(rid)

    def _build(self, req: Any) -> RequestState:
        params = req.sampling_params
        limits = Limits(len(req.origin_input_ids), self.max_draft_length)
        options = parse_options(params.custom_params, self.defaults, limits)
        drafter, reason = choose(options, limits.prompt_len, self.abilities, lora=req.lora_id is not None)
        started = time.perf_counter()
        row = self._row(req, drafter, options)
        if row is not None and self.metrics is not None:
            self.metrics.row(time.perf_counter() - started)
        source = self._copy_source(req, drafter, reason, options)
        return RequestState(
            options,
            law_row(params, options.config),
            penalties_of(req),
            _seed(req),
            row,
            "copy" if row is None and source is not None else drafter,
            reason,
            RequestPace(),
            source,
            [] if options.config.trace == "on" else None,
            self._reselection(req, row, options),
        )

    def _reselection(self, req: Any, row: DraftRow | None, options: RequestOptions) -> Reselection | None:
        """Nothing for re-encoded rows, whose spans would have to be prefilled again."""
        if not isinstance(row, View) or not wants_reselection(options.config):
            return None
        return Reselection(req.origin_input_ids, options.spans, options.config, self._indexing)

    def _copy_source(self, req: Any, drafter: str, reason: str, options: RequestOptions) -> CopySource | None:
        """Where the request copies from. Nowhere under a transfer: a copy has no draft law to transfer from."""
        config = options.config
        unwanted = drafter == "off" and reason == "requested"
        if unwanted or config.copy == "off" or config.transfer != "none":
            return None
        return CopySource(req.origin_input_ids, options.spans, self._indexing)

    def _row(self, req: Any, drafter: str, options: RequestOptions) -> DraftRow | None:
        if drafter == "off":
            return None
        prompt, weights = req.origin_input_ids, options.config.drafter_weights
        if drafter == "rag" and options.draft_ids:
            return self.reencoder.row(req, weights, options.draft_ids)  # type: ignore[union-attr]
        ranges = view_ranges(len(prompt), options.spans, options.config)
        if drafter == "view":
            return self.rows.build(req.kv.req_pool_idx, len(prompt), ranges, weights)
        prompts = [
            [token for start, end in variant for token in prompt[start:end]]
            for variant in tail_variants(ranges, options.spans)
        ]
        return self.reencoder.row(req, weights, *prompts)  # type: ignore[union-attr]


def law_row(params: Any, config: RapidConfig) -> LawRow:
    """A request's entry of the law, from SGLang's ``SamplingParams`` (where greedy is top_k = 1)."""
    transfer = Transfer[config.transfer.upper()]
    return LawRow(
        greedy=params.top_k <= 1,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        transfer=transfer,
        weight=config.eta if transfer is Transfer.DISTILL else config.lam,
        alpha=config.alpha,
        residual=Residual[config.residual.upper()],
        schedule=Schedule[config.schedule.upper()],
        gate=config.gate,
        answer_length=max(1, params.max_new_tokens),
        score=config.score,
    )


def _seed(req: Any) -> int:
    given = req.sampling_params.sampling_seed
    if given is not None:
        return given
    # ids are random per request; a hash of one is a fresh seed that a retracted request finds again
    return int.from_bytes(hashlib.blake2b(req.rid.encode(), digest_size=8).digest(), "little", signed=True)
