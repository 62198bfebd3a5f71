"""Which drafter serves a request, and why: the rule behind ``rapid_drafter`` in ``meta_info``."""

from __future__ import annotations

from dataclasses import dataclass

from rapid_sgl.request import RequestOptions


@dataclass(frozen=True)
class Abilities:
    """What a server can draft with."""

    no_views: str = ""  # why KV of this model cannot be picked token by token; "" when it can
    reencode: bool = False  # memory is set apart for re-encoded rows
    draft_model: bool = False  # a separate draft model runs over re-encoded rows


def choose(options: RequestOptions, prompt_len: int, abilities: Abilities, *, lora: bool) -> tuple[str, str]:
    """The drafter (view, rag or off) of one request and the reason for it.

    ``auto`` re-encodes where the drafter's own reading counts (a transfer, a draft prompt of the client's, a
    separate model) or where views are impossible, and otherwise takes a view, which costs no prefill.
    """
    wanted = options.config.drafter
    if wanted == "off":
        return "off", "requested"
    if lora:
        return "off", "lora"
    if prompt_len <= options.config.budget and not options.draft_ids:
        return "off", "short_prompt"
    if wanted == "auto":
        return _auto(options, abilities)
    if wanted == "view":
        return ("off", abilities.no_views) if abilities.no_views else ("view", "requested")
    return ("rag", "requested") if abilities.reencode else ("off", "no_draft_memory")


def _auto(options: RequestOptions, abilities: Abilities) -> tuple[str, str]:
    if abilities.reencode:
        for reason, holds in (
            ("draft_prompt", bool(options.draft_ids)),
            ("transfer", options.config.transfer != "none"),
            ("draft_model", abilities.draft_model),
            (abilities.no_views, bool(abilities.no_views)),
        ):
            if holds:
                return "rag", reason
    return ("off", abilities.no_views) if abilities.no_views else ("view", "cheapest")
