"""Ask every sample by every method, and keep what comes back."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rapid_sgl.bench.runner import new_client, rapid_report
from rapid_sgl.config import RapidConfig
from rapid_sgl.eval import EvalError
from rapid_sgl.eval.methods import RAG_ONLY, Method
from rapid_sgl.eval.prompts import EvalPrompt, Prompts
from rapid_sgl.eval.samples import Sample, Suite
from rapid_sgl.eval.store import RunFolder
from rapid_sgl.http_client import Client, Completion, ServerInfo
from rapid_sgl.retrieval.pipeline import Retriever
from rapid_sgl.retrieval.spans import Span


@dataclass(frozen=True)
class Asking:
    """How samples are asked."""

    prompts: Prompts
    retriever: Retriever
    config: RapidConfig  # budget, windows and draft length of all methods
    temperature: float
    seed: int
    max_prompt: int | None = None  # tokens; None: what the server takes


class Runner:
    """Sends requests to one server.

    With ``concurrency`` n, n samples make a group: one method answers all of them at once, then the
    next one, so that methods do not share batches. Prompts of a group are prefilled before the first method
    is timed.

    Args:
        folder: where predictions are kept; samples that it has are not asked again.
        advance: called after each prediction.
    """

    def __init__(
        self,
        url: str,
        info: ServerInfo,
        suite: Suite,
        asking: Asking,
        folder: RunFolder,
        concurrency: int,
        advance: Callable[[], None],
    ) -> None:
        self._url, self._info, self._suite, self._asking = url, info, suite, asking
        self._folder, self._concurrency, self._advance = folder, concurrency, advance
        self._rapid = rapid_report(info) is not None
        self._local = threading.local()

    def check_fits(self, samples: Sequence[Sample], lengths: Sequence[int]) -> None:
        """Refuse generated lengths that the server cannot take.

        Raises:
            EvalError: naming the length and the limit.
        """
        asking = self._asking
        for sample in samples:
            room = self._info.max_input_tokens
            if asking.max_prompt is not None:
                room = min(room, asking.max_prompt + sample.max_new_tokens)
            generated = sample.group.isdigit() and int(sample.group) in lengths
            if generated and int(sample.group) > room and asking.prompts.length(sample) > room:
                raise EvalError(
                    f"length {sample.group} is more than fits: {room} tokens with the answer; use shorter "
                    "--lengths, a model with a longer context, or a larger --max-total-tokens or --max-prompt"
                )

    def run(self, samples: Sequence[Sample], methods: Sequence[Method]) -> None:
        """Predict what is missing.

        Raises:
            ServerError: a request failed; what was predicted is kept.
            EvalError: a stored prediction belongs to another prompt, or a prompt has no room.
        """
        with ThreadPoolExecutor(self._concurrency) as pool:
            for first in range(0, len(samples), self._concurrency):
                group = samples[first : first + self._concurrency]
                asked = list(pool.map(lambda sample: self._plan(sample, methods), group))
                self._check_stored(asked)
                missing = [
                    [
                        plan
                        for plans in asked
                        for plan in plans
                        if plan.method == method and not self._has(plan)
                    ]
                    for method in methods
                ]
                if len(group) > 1:
                    list(pool.map(self._prefill, _distinct([plan for plans in missing for plan in plans])))
                for plans in missing:
                    list(pool.map(self._predict, plans))

    def _plan(self, sample: Sample, methods: Sequence[Method]) -> list[_Plan]:
        asking = self._asking
        limit = self._info.max_prompt_tokens(sample.max_new_tokens)
        limit = min(limit, asking.max_prompt or limit)
        whole = asking.prompts.build(sample, limit)
        spans = self._spans(sample, whole) if any(method.drafter for method in methods) else []
        plans = []
        for method in methods:
            if method.name == RAG_ONLY:
                prompt, chosen = self._excerpt(sample, whole, min(asking.config.budget, limit))
                plans.append(_Plan(sample, method, prompt, chosen))
            else:
                plans.append(_Plan(sample, method, whole, spans if method.drafter else []))
        return plans

    def _spans(self, sample: Sample, prompt: EvalPrompt) -> list[Span]:
        config = self._asking.config
        return self._asking.retriever.select_chunks(
            prompt.chunks,
            sample.question,
            len(prompt),
            budget=config.budget,
            head=config.head,
            recent=config.recent,
        )

    def _excerpt(self, sample: Sample, whole: EvalPrompt, budget: int) -> tuple[EvalPrompt, list[Span]]:
        if len(whole) <= budget:
            return whole, []
        prompts = self._asking.prompts
        room = prompts.excerpt_room(sample, budget)
        spans = self._asking.retriever.select_chunks(
            whole.chunks, sample.question, len(whole), budget=room, head=0, recent=0
        )
        return prompts.build_excerpt(sample, whole, spans, budget), spans

    def _has(self, plan: _Plan) -> bool:
        return (plan.sample.id, plan.method.name) in self._folder.predictions

    def _check_stored(self, asked: Sequence[Sequence[_Plan]]) -> None:
        for plan in (plan for plans in asked for plan in plans if self._has(plan)):
            stored = self._folder.predictions[plan.sample.id, plan.method.name]
            if stored["prompt_digest"] != plan.digest:
                raise EvalError(
                    f"{self._folder.path} has an answer of {plan.method.name} to another prompt of "
                    f"{plan.sample.id}; the data or the word list have changed: use another --output"
                )

    def _prefill(self, plan: _Plan) -> None:
        body: dict[str, Any] = {"temperature": 0, "max_new_tokens": 1}
        if self._rapid:
            body["custom_params"] = Method("target").custom_params(self._asking.config, [])
        self._client().generate(input_ids=plan.prompt.ids, sampling_params=body)

    def _predict(self, plan: _Plan) -> None:
        sampling = self._sampling(plan)
        completion = self._client().complete(
            incremental=self._info.incremental_stream, input_ids=plan.prompt.ids, sampling_params=sampling
        )
        score = self._suite.score(plan.sample, completion.text)
        self._folder.add(plan.record(score, completion))
        self._advance()

    def _sampling(self, plan: _Plan) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "temperature": self._asking.temperature,
            "max_new_tokens": plan.sample.max_new_tokens,
        }
        if self._asking.temperature > 0:
            text = f"{self._asking.seed} {plan.sample.id}"
            sampling["sampling_seed"] = int(hashlib.sha256(text.encode()).hexdigest()[:7], 16)
        if plan.sample.stop_at_newline:  # but not before there is an answer, as in LongBench's pred.py
            newline = self._asking.prompts.tokenizer.encode("\n", add_special_tokens=False)[-1]
            sampling |= {"stop_token_ids": [newline], "min_new_tokens": 1}
        if self._rapid:
            sampling["custom_params"] = plan.method.custom_params(self._asking.config, plan.spans)
        return sampling

    def _client(self) -> Client:
        """One per thread: sessions are not made for sharing."""
        if not hasattr(self._local, "client"):
            self._local.client = new_client(self._url)
        client: Client = self._local.client
        return client


@dataclass(frozen=True)
class _Plan:
    """One request."""

    sample: Sample
    method: Method
    prompt: EvalPrompt
    spans: list[Span]

    @property
    def digest(self) -> str:
        text = ",".join(
            map(str, [*self.prompt.ids, "spans", *(bound for span in self.spans for bound in span)])
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def record(self, score: float, completion: Completion) -> dict[str, Any]:
        meta = completion.meta_info
        return {
            "sample": self.sample.id,
            "method": self.method.name,
            "task": self.sample.task,
            "length": self.sample.group,
            "score": score,
            "prediction": completion.text,
            "answers": self.sample.answers,
            "prompt_tokens": completion.prompt_tokens,
            "retrieved_tokens": sum(end - start for start, end in self.spans),
            "completion_tokens": completion.completion_tokens,
            "finish": completion.finish_reason,
            "ttft_s": round(completion.ttft_s, 4),
            "decode_s": round(completion.decode_s, 4),
            "decode_tokens": completion.decode_tokens,
            "e2e_s": meta.get("e2e_latency"),
            "accept_length": completion.accept_length,
            "drafter": meta.get("rapid_drafter"),
            "prompt_digest": self.digest,
        }


def _distinct(plans: Sequence[_Plan]) -> list[_Plan]:
    """One plan for each prompt."""
    return list({tuple(plan.prompt.ids): plan for plan in plans}.values())
