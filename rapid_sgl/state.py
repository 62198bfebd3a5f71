"""What RAPID keeps of a running request: its options, its law, its seed and its draft row.

Keyed by request id, filled at the first decode step, released when SGLang releases the
request's KV row (finish, abort, retraction).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rapid_sgl.config import RapidConfig
from rapid_sgl.drafter.rows import DraftRows, View, view_ranges
from rapid_sgl.request import RequestOptions, parse_options
from rapid_sgl.verify.law import LawRow, Residual, Transfer
from rapid_sgl.verify.penalties import Penalties, penalties_of


@dataclass(frozen=True)
class RequestState:
    """One running request, as the worker sees it."""

    options: RequestOptions
    law: LawRow
    penalties: Penalties
    seed: int  # int64; of the request, or derived from its id
    view: View | None  # None: the request decodes without drafts
    reason: str  # why there is no view; "" when there is one


class RequestTable:
    """States of the running requests.

    Args:
        rows: where views are built.
        defaults: the server's config.
        max_draft_length: drafts per step that verify slots are reserved for.
        unsupported: why this model cannot be drafted from views; "" when it can.
    """

    def __init__(self, rows: DraftRows, defaults: RapidConfig, max_draft_length: int, unsupported: str):
        self.rows = rows
        self.defaults = defaults
        self.max_draft_length = max_draft_length
        self.unsupported = unsupported
        self.undrafted: Counter[str] = Counter()  # requests without a view, by reason
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def get(self, req: Any) -> RequestState:
        """The state of a decoding request (SGLang's ``Req``); built when it is new or was moved to another row."""
        state = self._states.get(req.rid)
        if state is None or (state.view is not None and state.view.pool_idx != req.kv.req_pool_idx):
            state = self._states[req.rid] = self._build(req)
            if state.view is None:
                self.undrafted[state.reason] += 1
        return state

    def release(self, rid: str) -> None:
        self._states.pop(rid, None)

    def clear(self) -> None:
        self._states.clear()

    def _build(self, req: Any) -> RequestState:
        params = req.sampling_params
        prompt_len = len(req.origin_input_ids)
        options = parse_options(
            params.custom_params, self.defaults, prompt_len=prompt_len, max_draft_length=self.max_draft_length
        )
        reason = self._why_undrafted(req, options, prompt_len)
        view = None
        if not reason:
            ranges = view_ranges(prompt_len, options.spans, options.config)
            view = self.rows.build(req.kv.req_pool_idx, prompt_len, ranges)
        return RequestState(
            options, law_row(params, options.config), penalties_of(req), _seed(req), view, reason
        )

    def _why_undrafted(self, req: Any, options: RequestOptions, prompt_len: int) -> str:
        if options.config.drafter == "off":
            return "off"
        if self.unsupported:
            return self.unsupported
        if prompt_len <= options.config.budget:
            return "short_prompt"
        return "lora" if req.lora_id is not None else ""


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
    )


def _seed(req: Any) -> int:
    given = req.sampling_params.sampling_seed
    if given is not None:
        return given
    # ids are random per request; a hash of one is a fresh seed that a retracted request finds again
    return int.from_bytes(hashlib.blake2b(req.rid.encode(), digest_size=8).digest(), "little", signed=True)
