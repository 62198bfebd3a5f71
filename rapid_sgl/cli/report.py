"""The summary that ``rapid-sgl ask`` prints: what was read, what was drafted, how fast it went."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rapid_sgl.cli.asking import Plan, Question
from rapid_sgl.http_client import Completion, ServerInfo
from rapid_sgl.retrieval.prompt import Prompt
from rapid_sgl.retrieval.spans import Span

WORDS_SHOWN = 9


@dataclass(frozen=True)
class Part:
    """A token range of the prompt that was used, with its share of the document and first words."""

    kind: str  # head, retrieved, recent or document
    start: int
    end: int
    document_share: float  # 0 to 1
    text: str

    def __str__(self) -> str:
        span = f"{self.start:,}-{self.end:,}"
        return f"  {self.kind:<9} {span:>13} {self.document_share:>6.1%}  {self.text}"


class Report:
    """One answered question: ``as_text`` for people, ``as_json`` for programs."""

    def __init__(self, question: Question, plan: Plan, info: ServerInfo, completion: Completion) -> None:
        self._question, self._plan, self._info, self._completion = question, plan, info, completion
        self.parts = used_parts(question, plan, info)
        self.notes = self.notes_before(question, plan, info)

    @staticmethod
    def notes_before(question: Question, plan: Plan, info: ServerInfo) -> list[str]:
        """What the user should know before the answer: truncation, and why nothing is drafted."""
        notes = []
        if plan.whole.truncated_tokens:
            notes.append(
                f"{plan.whole.truncated_tokens:,} tokens were cut from the middle of the document to fit the model"
            )
        if question.method != "rapid":
            return notes
        if info.speculative_algorithm != "RAPID":
            algorithm = info.speculative_algorithm or "none"
            notes.append(
                f"the server does not run RAPID (its speculative algorithm: {algorithm}), so nothing is drafted "
                "from the document; start it with `rapid-sgl serve`"
            )
        elif len(plan.ids) <= question.config.budget:
            notes.append(
                f"the prompt of {len(plan.ids):,} tokens is no longer than the draft budget of "
                f"{question.config.budget:,}, so a view could not be shorter: no drafts"
            )
        elif not plan.spans:
            notes.append("no part of the document matches the question; drafting from head and recent")
        return notes

    def as_text(self) -> str:
        """A few lines: sizes, speed, accept length, parts used."""
        done, whole = self._completion, self._plan.whole
        document = whole.document[1] - whole.document[0]
        speed = done.decode_tokens_per_s
        lines = [
            f"prompt   {done.prompt_tokens:,} tokens ({done.cached_tokens:,} from cache); "
            f"the document has {document:,} in {len(whole.chunks)} chunks",
            f"answer   {done.completion_tokens:,} tokens, finished by {done.finish_reason}",
            f"speed    {f'{speed:.1f} tokens/s' if speed else 'too short to time'} decoding; "
            f"first token after {done.ttft_s:.1f} s",
            f"method   {self._question.method}: {self._acceptance()}",
        ]
        used = sum(part.end - part.start for part in self.parts)
        reader = "the prompt is made of" if self._question.method == "rag" else "drafts read"
        if [part.kind for part in self.parts] != ["document"]:
            lines.append(
                f"{reader} {used:,} of {len(whole):,} tokens (range, share of the document, first words):"
            )
            lines += map(str, self.parts)
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Everything of ``as_text`` and the answer, as plain values; see the keys."""
        done, whole, question = self._completion, self._plan.whole, self._question
        return {
            "question": question.text,
            "answer": done.text,
            "method": question.method,
            "model": self._info.model_path,
            "finish_reason": done.finish_reason,
            "prompt_tokens": done.prompt_tokens,
            "cached_tokens": done.cached_tokens,
            "new_tokens": done.completion_tokens,
            "ttft_s": done.ttft_s,
            "decode_s": done.decode_s,
            "decode_tokens_per_s": done.decode_tokens_per_s,
            "accept_length": done.accept_length,
            "target_passes": done.meta_info.get("spec_verify_ct"),
            "document_tokens": whole.document[1] - whole.document[0],
            "truncated_tokens": whole.truncated_tokens,
            "chunks": len(whole.chunks),
            "custom_params": self._plan.custom_params,
            "parts": [asdict(part) for part in self.parts],
            "notes": self.notes,
        }

    def _acceptance(self) -> str:
        length = self._completion.accept_length
        if length is None or length == 1:
            return "no drafts"
        passes = self._completion.meta_info.get("spec_verify_ct")
        return f"{length:.2f} tokens per target pass ({passes} passes)"


def used_parts(question: Question, plan: Plan, info: ServerInfo) -> list[Part]:
    """What the drafter read, or under method rag what the prompt was made of, in document order.

    One part of kind ``document`` stands for all of it, where nothing was left out or drafted.
    """
    whole, config = plan.whole, question.config
    if question.method == "rag" and plan.ids is not whole.ids:
        return [_part("retrieved", span, whole) for span in plan.spans]
    drafting = info.speculative_algorithm == "RAPID" and config.drafter != "off"
    if question.method != "rapid" or not drafting or len(whole) <= config.budget:
        return [_part("document", whole.document, whole)]
    windows = [("head", (0, config.head)), ("recent", (len(whole) - config.recent, len(whole)))]
    parts = [*windows, *(("retrieved", span) for span in plan.spans)]
    ordered = sorted(parts, key=lambda part: part[1])
    return [_part(kind, span, whole) for kind, span in ordered if span[0] < span[1]]


def _part(kind: str, span: Span, prompt: Prompt) -> Part:
    first, last = prompt.document
    inside = max(0, min(span[1], last) - max(span[0], first))
    words = prompt.document_text(span).split()
    text = " ".join(words[:WORDS_SHOWN]) + (" …" if len(words) > WORDS_SHOWN else "")
    return Part(kind, span[0], span[1], inside / max(1, last - first), text)
