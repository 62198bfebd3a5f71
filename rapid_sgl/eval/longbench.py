"""LongBench v1 and v2, from their official files.

Prompts, answer lengths, truncation in the middle and scores follow THUDM/LongBench (MIT): for v1
LongBench/config/*.json, LongBench/pred.py, LongBench/eval.py and LongBench/metrics.py; for v2
prompts/*.txt, pred.py and result.py. What differs is listed in docs/eval.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from rapid_sgl.eval import EvalError
from rapid_sgl.eval.longbench_prompts import CHOICES, NEW_TOKENS, PROMPTS, RAG_BEFORE
from rapid_sgl.eval.metrics import (
    edit_similarity,
    qa_f1,
    qa_f1_chinese,
    rouge_l,
    rouge_l_chinese,
)
from rapid_sgl.eval.samples import Sample, SuiteOptions, need_data, read_jsonl

# "chat models are better off without build prompts on these tasks" (pred.py)
WITHOUT_TEMPLATE = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")
# LongBench-E, the subset with even lengths, has these tasks; its files end in _e.
EVEN = (
    *("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec"),
    *("triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)
V2_NEW_TOKENS = 128


class LongBench:
    """The suite ``longbench``: v1, and LongBench-E by the names with ``_e``."""

    default_tasks = tuple(PROMPTS)
    tasks = (*PROMPTS, *(f"{task}_e" for task in EVEN))
    temperature = 0.0

    def samples(self, task: str, options: SuiteOptions) -> list[Sample]:
        kind = task.removesuffix("_e")
        path = need_data(
            options, task, [f"{task}.jsonl"], "huggingface.co/datasets/THUDM/LongBench (data.zip)"
        )
        before, after = PROMPTS[kind].split("{context}")
        found = []
        for index, item in enumerate(
            read_jsonl(path, ["input", "context", "answers", "length", "all_classes"])
        ):
            if index == options.count:
                break
            if not item["answers"]:
                raise EvalError(f"{path}, item {index + 1}: no answers")
            found.append(
                Sample(
                    id=f"{task}/{index}",
                    task=task,
                    group=_bin(item["length"]) if task.endswith("_e") else "all",
                    before=before,
                    context=item["context"],
                    after=after.replace("{input}", item["input"]),
                    question=item["input"].strip() or after.strip(),
                    answers=item["answers"],
                    max_new_tokens=NEW_TOKENS[kind],
                    chat=kind not in WITHOUT_TEMPLATE,
                    stop_at_newline=kind == "samsum",
                    extra={"classes": item["all_classes"]},
                )
            )
        return found

    def score(self, sample: Sample, answer: str) -> float:
        kind = sample.task.removesuffix("_e")
        if kind in FIRST_LINE:
            answer = answer.lstrip("\n").split("\n")[0]
        if kind in ("trec", "lsht"):
            classes = sample.extra["classes"]
            return max(class_score(answer, reference, classes) for reference in sample.answers)
        return max(METRICS[kind](answer, reference) for reference in sample.answers)


class LongBenchV2:
    """The suite ``longbench2``: multiple choice, without chain of thought."""

    tasks = ("longbench_v2",)
    default_tasks = tasks
    temperature = 0.1

    def samples(self, task: str, options: SuiteOptions) -> list[Sample]:
        names = ["longbench_v2.jsonl", "data.json", "data.jsonl"]
        path = need_data(options, task, names, "huggingface.co/datasets/THUDM/LongBench-v2 (data.json)")
        found = []
        for index, item in enumerate(read_jsonl(path, V2_FIELDS)):
            if index == options.count:
                break
            found.append(_v2_sample(task, item))
        return found

    def score(self, sample: Sample, answer: str) -> float:
        return float(chosen_letter(answer) == sample.answers)


V2_FIELDS = (
    *("_id", "difficulty", "length", "question", "answer", "context"),
    *(f"choice_{letter}" for letter in "ABCD"),
)


def _v2_sample(task: str, item: dict[str, Any]) -> Sample:
    before, after = CHOICES.split("$DOC$")
    question = item["question"].strip()
    after = after.replace("$Q$", question)
    for letter in "ABCD":
        after = after.replace(f"$C_{letter}$", item[f"choice_{letter}"].strip())
    return Sample(
        id=f"{task}/{item['_id']}",
        task=task,
        group=item["length"],
        before=before,
        context=item["context"].strip(),
        after=after,
        question=" ".join([question, *(item[f"choice_{letter}"].strip() for letter in "ABCD")]),
        answers=item["answer"],
        max_new_tokens=V2_NEW_TOKENS,
        numbered_excerpts=True,
        extra={"excerpt_before": RAG_BEFORE, "difficulty": item["difficulty"]},
    )


def chosen_letter(answer: str) -> str | None:
    """The letter that an answer of v2 names in the form asked for; None without one."""
    text = answer.strip().replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", text) or re.search(
        r"The correct answer is ([A-D])", text
    )
    return found[1] if found else None


def class_score(answer: str, reference: str, classes: list[str]) -> float:
    """1 / number of classes named, where the right one is among them.

    A class that is part of the right one's name does not count. The official code takes such
    classes out of the list while it walks through it, so the one behind each is skipped; as here.
    """
    named = [name for name in classes if name in answer]
    place = 0
    while place < len(named):
        if named[place] in reference and named[place] != reference:
            named.remove(named[place])
        place += 1
    return 1 / len(named) if reference in named else 0.0


def number_share(answer: str, wanted: str) -> float:
    """Share of the answer's numbers that are the wanted one; 0 without numbers."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def _paragraph(word: str) -> Callable[[str, str], float]:
    def score(answer: str, reference: str) -> float:
        found = re.search(rf"{word}(\d+)", reference)
        if not found:
            raise EvalError(f"the reference {reference!r} names no paragraph as {word!r} and a number")
        return number_share(answer, found[1])

    return score


def code_line(answer: str) -> str:
    """The first line without comment marks or code fences; "" where there is none."""
    lines = answer.lstrip("\n").split("\n")
    return next((line for line in lines if not re.search(r"`|#|//", line)), "")


def _code(answer: str, reference: str) -> float:
    return edit_similarity(code_line(answer), reference)


METRICS: dict[str, Callable[[str, str], float]] = {
    **dict.fromkeys(
        ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"), qa_f1
    ),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), rouge_l),
    **dict.fromkeys(("dureader", "vcsum"), rouge_l_chinese),
    **dict.fromkeys(("lcc", "repobench-p"), _code),
    "multifieldqa_zh": qa_f1_chinese,
    "passage_count": lambda answer, reference: number_share(answer, str(reference)),
    "passage_retrieval_en": _paragraph("Paragraph "),
    "passage_retrieval_zh": _paragraph("段落"),
}


def _bin(length: int) -> str:
    return "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"
