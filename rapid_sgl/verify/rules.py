"""What a request's own settings do to logits: penalties, grammar mask, logit bias, custom processors.

Applied to the target's and to the drafter's logits alike, before p and q are formed, in the
order of SGLang's sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rapid_sgl.verify.penalties import Penalties


class LogitRules:
    """The rules of one decode step.

    Args:
        batch: SGLang's ``ScheduleBatch`` in decode mode.
        penalties: one per request.
    """

    def __init__(self, batch: Any, penalties: Sequence[Penalties]):
        self.batch = batch
        self.info = batch.sampling_info
        self.penalised = [b for b, settings in enumerate(penalties) if settings.active]
        self.penalties = penalties
        self.grammars = {b: req.grammar for b, req in enumerate(batch.reqs) if req.grammar is not None}

    def apply_to_target_(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        """Edit target logits in place.

        Args:
            logits: float [bs * width, vocab], SGLang's verify layout.
            tokens: int64 [bs, width]: last committed token, then the drafts, then padding.
        """
        width = tokens.shape[1]
        per_request = logits.view(tokens.shape[0], width, -1)
        for b in self.penalised:
            self.penalties[b].apply_(per_request[b], self.batch.reqs[b].output_ids, tokens[b, 1:].tolist())
        if self.grammars:
            self._mask_target_(logits, tokens)
        if self.info.logit_bias is not None:
            per_request += self.info.logit_bias[:, None]
        if self.info.has_custom_logit_processor:
            from sglang.srt.layers.sampler import apply_custom_logit_processor

            apply_custom_logit_processor(logits, self.info, num_tokens_in_batch=width)

    def apply_to_draft_(
        self, logits: torch.Tensor, rows: Sequence[int], chains: Sequence[Sequence[int]]
    ) -> None:
        """Edit draft logits in place.

        Args:
            logits: float [len(rows), vocab]; row i predicts what follows ``chains[rows[i]]``.
            rows: batch index of each logits row.
            chains: drafts so far of every request of the batch.
        """
        where = {b: i for i, b in enumerate(rows)}
        for b in self.penalised:
            if b in where:
                history = [*self.batch.reqs[b].output_ids, *chains[b]]
                self.penalties[b].apply_(logits[where[b]][None], history, ())
        for b, grammar in self.grammars.items():
            if b in where:
                mask = grammar.allocate_vocab_mask(self.info.vocab_size, 1, "cpu")
                grammar.fill_vocab_mask(mask, 0)
                row = logits[where[b]][None]
                grammar.apply_vocab_mask(row, grammar.move_vocab_mask(mask, logits.device))
        if self.info.logit_bias is not None:
            logits += self.info.logit_bias[list(rows)]

    def _mask_target_(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

        mask = build_grammar_vocab_mask(
            reqs=self.batch.reqs,
            tree=GrammarTree.from_linear_chain(tokens),
            sampling_info=self.info,
            device=logits.device,
            barrier=None,
        )
        if mask is not None:
            mask.apply(logits)


class GrammarWalk:
    """Advances grammars along the drafts and takes every step back when the chain is done.

    A chain ends where its grammar terminates, so drafts never run past a complete answer.
    """

    def __init__(self, rules: LogitRules):
        self.grammars = rules.grammars
        self.vocab_size = rules.info.vocab_size
        self.steps = dict.fromkeys(self.grammars, 0)

    def accept(self, row: int, token: int) -> bool:
        """Move request ``row`` over ``token``; False when its chain must end here."""
        grammar = self.grammars.get(row)
        if grammar is None:
            return True
        grammar.accept_token(token)
        self.steps[row] += 1
        return not grammar.is_terminated()

    def follow(self, row: int, tokens: Sequence[int]) -> list[int]:
        """Move request ``row`` over a copied chain; returns the part of it that the grammar allows."""
        grammar = self.grammars.get(row)
        if grammar is None:
            return list(tokens)
        taken: list[int] = []
        for token in tokens:
            if grammar.is_terminated() or not _allows(grammar, token, self.vocab_size):
                break
            taken.append(token)
            self.accept(row, token)
        return taken

    def rewind(self) -> None:
        for row, count in self.steps.items():
            if count:
                self.grammars[row].rollback(count)


def _allows(grammar: Any, token: int, vocab_size: int) -> bool:
    """Whether a grammar (SGLang's ``BaseGrammarObject``) takes ``token`` next."""
    mask = grammar.allocate_vocab_mask(vocab_size, 1, "cpu")
    grammar.fill_vocab_mask(mask, 0)
    row = torch.zeros(1, vocab_size)
    grammar.apply_vocab_mask(row, mask)
    return bool(row[0, token] == 0)
