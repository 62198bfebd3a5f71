"""InfiniteBench: retrieval tasks generated at any length, book tasks from their official files.

Prompts, generators, answer lengths and scores follow OpenBMB/InfiniteBench (MIT): src/prompt.py
(with a chat template those of GPT-4, without those of YaRN-Mistral), src/eval_utils.py,
src/compute_scores.py and data/construct_synthetic_dataset.py; what differs is listed in docs/eval.md.
"""

from __future__ import annotations

import random
import re
import uuid
from pathlib import Path
from typing import Any

from rapid_sgl.eval import EvalError
from rapid_sgl.eval.metrics import qa_f1, rouge_l_sum
from rapid_sgl.eval.samples import (
    GOLDEN,
    Sample,
    SuiteOptions,
    data_file,
    fill,
    largest_size,
    need_data,
    read_jsonl,
    sample_rng,
)

NEW_TOKENS = {
    "passkey": 6,
    "number_string": 12,
    "kv_retrieval": 50,
    "longbook_sum_eng": 1200,
    "longbook_choice_eng": 40,
    "longbook_qa_eng": 40,
}
# GPT-4 was run without a limit. A chat model spends tokens on "The pass key is", so with a chat template
# the limits above, which are for base models, are not applied below this one.
CHAT_NEW_TOKENS = 64
GENERATED = ("passkey", "number_string", "kv_retrieval")
_OPTIONS = "\nA. {OPTION_A}\nB. {OPTION_B}\nC. {OPTION_C}\nD. {OPTION_D}"
_HIDDEN = "There is an important info hidden inside a lot of irrelevant text. "
_JSON = (
    "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}\n\n{input}"
)
CHAT_TEMPLATES = {
    "passkey": _HIDDEN
    + "Find it and memorize them. I will quiz you about the important information there.\n\n{context}\n\n{input}",
    "number_string": _HIDDEN
    + "Find it. I will quiz you about the important information there.\n\n{context}\n\n{input}",
    "kv_retrieval": _JSON,
    "longbook_sum_eng": "Summarize the following book.\n\n{context}",
    "longbook_choice_eng": "Read the book and answer the question.\n\n{context}\n\nQuestion: {input}\n\n"
    "Only one of the following options is correct, tell me the answer using one single letter (A, B, C, or D). "
    "Don't say anything else." + _OPTIONS,
    "longbook_qa_eng": "Read the book below and answer a question.\n\n{context}\n\nQuestion: {input}\n\nBe very concise.",
}
PLAIN_TEMPLATES = {
    "passkey": _HIDDEN
    + "Find it and memorize it. I will quiz you about the important information.\n\n{context}\n\n"
    "{input}\n\nThe pass key is",
    "number_string": _HIDDEN
    + "Find it. I will quiz you about the important information there.\n\n{context}\n\n"
    "{input}\n\nThe sequence of digits is",
    "kv_retrieval": _JSON,
    "longbook_sum_eng": "Summarize the book below.\n\n{context}\n\nSummary:",
    "longbook_choice_eng": "Read the book and answer the question.\n\n{context}\n\nQuestion: {input}"
    + _OPTIONS
    + "\n\nThe letter of the correct answer is",
    "longbook_qa_eng": "Read the book and answer the question. Be very concise in your answer.\n\n{context}\n\n"
    "Question: {input}\nAnswer:",
}
SYSTEM = "You are a helpful assistant"
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
PASSKEY = "The pass key is {key}. Remember it. {key} is the pass key.\n"
NUMBER = "The sequence of digits is {key}. Remember it. {key} is the sequence of digits.\n"


class InfiniteBench:
    """The suite ``infinitebench``."""

    default_tasks = GENERATED
    tasks = tuple(NEW_TOKENS)
    temperature = 0.0

    def samples(self, task: str, options: SuiteOptions) -> list[Sample]:
        names = [f"{task}.jsonl"]
        if task in GENERATED and data_file(options, names) is None:
            return [sample for length in options.lengths for sample in _generated(task, options, length)]
        path = need_data(options, task, names, "huggingface.co/datasets/xinrongzhang2022/InfiniteBench")
        return _read(path, task, options)

    def score(self, sample: Sample, answer: str) -> float:
        label = sample.answers
        if sample.task in ("passkey", "number_string"):
            return float(first_integer(answer) == label[0])
        if sample.task == "kv_retrieval":
            return float(label[0] in re.sub(r"[\n:\"'.,?!{}]", " ", answer).split())
        if sample.task == "longbook_choice_eng":
            return float(chosen_right(answer, label))
        if sample.task == "longbook_qa_eng":
            return max(qa_f1(answer, reference) for reference in label)
        return max(rouge_l_sum(answer, reference) for reference in label)


def first_integer(answer: str) -> str:
    """The first run of digits, "" where there is none."""
    found = re.search(r"[0-9]+", answer)
    return found[0] if found else ""


def chosen_right(answer: str, label: list[str]) -> bool:
    """Whether an answer chooses the right option.

    Args:
        label: the option's text and its letter.
    """
    answer = answer.strip()
    if not answer:
        return False
    if answer[0] in "ABCD":
        return answer[0] in label
    if answer in label:
        return True
    answer = re.sub(r" {2,}", " ", re.sub(r"[\n\"'.,?!{}]", " ", answer))
    for words in ("answer is:", "answer:", "answer is", "option is"):
        place = answer.find(words)
        if place >= 0:
            rest = answer[place + len(words) + 1 :]
            return bool(rest) and any(rest.startswith(text) for text in label)
    # The first word that occurs in "ABCD", so "AB" is one: it is not in the label and scores 0.
    word = next((word for word in answer.split() if word in "ABCD"), "")
    return word in label


def _generated(task: str, options: SuiteOptions, length: int) -> list[Sample]:
    def make(rng: random.Random, index: int, size: int) -> Sample:
        depth = (index + 0.5) * GOLDEN % 1
        text = _pairs(rng, size, depth) if task == "kv_retrieval" else _needle(rng, task, size, depth)
        return _sample(options, f"{task}/{length}/{index}", task, str(length), text)

    def tokens(size: int) -> int:
        return options.prompts.length(make(sample_rng(options, task, length, 0), 0, size))

    size = largest_size(tokens, length, 1, f"{task} at length {length}")
    return [
        fill(lambda rng, units, at=index: make(rng, at, units), options, task, length, index, size)  # type: ignore[misc]
        for index in range(options.count)
    ]


def _needle(rng: random.Random, task: str, size: int, depth: float) -> dict[str, Any]:
    """One line with five digits (passkey) or ten that repeat (number string) among ``size`` lines of noise."""
    digits = [str(rng.randint(0, 9)) for _ in range(5)]
    if task == "number_string":
        for count in range(5):
            place = rng.randint(0, 4 + count)
            digits.insert(place, digits[place])
    key = "".join(digits)
    line, name = (PASSKEY, "pass key") if task == "passkey" else (NUMBER, "sequence of digits")
    before = round(depth * size)
    context = NOISE * before + line.replace("{key}", key) + NOISE * (size - before)
    return {"context": context, "input": f"What is the {name}?", "answer": [key]}


def _pairs(rng: random.Random, size: int, depth: float) -> dict[str, Any]:
    """A JSON object of ``size`` pairs of UUIDs, one of them asked for."""
    pairs = [
        tuple(str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(2)) for _ in range(size)
    ]
    key, value = pairs[int(depth * size)]
    text = ", ".join(f'"{one}": "{other}"' for one, other in pairs)
    asked = f'\nKey: "{key}"\nThe value associated with the specified key is: '
    return {"context": f"JSON data:\n{{{text}}}", "input": asked, "answer": [value]}


def _read(path: Path, task: str, options: SuiteOptions) -> list[Sample]:
    fields = ["context", "input", "answer"] + (["options"] if task == "longbook_choice_eng" else [])
    found = []
    for index, item in enumerate(read_jsonl(path, fields)):
        if index == options.count:
            break
        item["answer"] = _label(path, index, item)
        found.append(_sample(options, f"{task}/all/{index}", task, "all", item))
    return found


def _label(path: Path, index: int, item: dict[str, Any]) -> list[str]:
    answer = item["answer"] if isinstance(item["answer"], list) else [item["answer"]]
    if "options" not in item or not item["options"] or (len(answer) == 2 and answer[1] in list("ABCD")):
        return answer
    if len(item["options"]) != 4 or len(answer) != 1 or answer[0] not in item["options"]:
        raise EvalError(f"{path}, item {index + 1}: the answer {answer!r} is not one of four options")
    return [answer[0], "ABCD"[item["options"].index(answer[0])]]


def _sample(options: SuiteOptions, identity: str, task: str, group: str, item: dict[str, Any]) -> Sample:
    chat = options.prompts.chat
    before, after = (CHAT_TEMPLATES if chat else PLAIN_TEMPLATES)[task].split("{context}")
    after = after.replace("{input}", item["input"])
    if task == "longbook_choice_eng":
        for letter, option in zip("ABCD", item["options"], strict=True):
            after = after.replace(f"{{OPTION_{letter}}}", option)
    return Sample(
        id=identity,
        task=task,
        group=group,
        before=before,
        context=item["context"],
        after=after,
        question=item["input"].strip() or before.strip(),
        answers=item["answer"],
        max_new_tokens=max(NEW_TOKENS[task], CHAT_NEW_TOKENS) if chat else NEW_TOKENS[task],
        system=SYSTEM if chat else None,
    )
