"""How RULER's samples are made: one function per task, from random numbers and a size to a sample's parts.

Semantics of NVIDIA/RULER (Apache-2.0), scripts/data/synthetic/*.py; what differs is listed in docs/eval.md.
"""

from __future__ import annotations

import json
import math
import random
import re
import string
import uuid
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from rapid_sgl.eval import EvalError
from rapid_sgl.eval.prompts import Prompts
from rapid_sgl.eval.ruler_prompts import (
    CWE_PREFIX,
    CWE_TEMPLATE,
    FWE_PREFIX,
    FWE_TEMPLATE,
    NEEDLE,
    NEW_TOKENS,
    NIAH_PREFIX,
    NIAH_TEMPLATE,
    NOISE,
    QA_PREFIX,
    QA_TEMPLATE,
    VT_PREFIX,
    VT_TEMPLATE,
)
from rapid_sgl.eval.ruler_qa import QaSet
from rapid_sgl.eval.ruler_words import ADJECTIVES, NOUNS, common_words, reference_text
from rapid_sgl.eval.samples import SuiteOptions, largest_size

# Name: (haystack, kind of key, kind of value, keys, values per key, queries), as in scripts/synthetic.yaml.
NIAH = {
    "niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needle", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": ("needle", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
}
# Needles stand at 40 evenly spaced depths, in percent of the sentences.
DEPTHS = tuple(round(100 * step / 39) for step in range(40))
HOPS = 4
SHORT = 4096  # below this length word lists repeat less, so that they fit
MANY_WORDS = 10**6  # more than there are
Words = list[str]


def _message(template: str, prefix: str, context: str, question: str, answers: Words) -> dict[str, Any]:
    before, after = template.split("{context}")
    return {
        "before": before,
        "context": context,
        "after": after,
        "question": question,
        "answers": answers,
        "answer_prefix": prefix,
    }


def niah(rng: random.Random, task: str, size: int, haystack: Words) -> dict[str, Any]:
    """Needles in ``size`` words (essay) or sentences (noise, needle) of hay."""
    hay, key_kind, kind, keys, values, queries = NIAH[task]
    needles: dict[str, Words] = {}
    while len(needles) < keys:
        needles[_random(rng, key_kind)] = [_random(rng, kind) for _ in range(values)]
    lines = [
        NEEDLE.format(kind=kind, key=key, value=value) for key, found in needles.items() for value in found
    ]
    rng.shuffle(lines)
    if hay == "essay":
        context = _in_essay(rng, haystack, size, lines)
    else:
        sentences = [NOISE] * size
        if hay == "needle":
            sentences = [
                NEEDLE.format(kind=kind, key=_random(rng, key_kind), value=_random(rng, kind))
                for _ in range(size)
            ]
        places = sorted(rng.sample(range(size), len(lines)), reverse=True)
        for place, line in zip(places, lines, strict=True):
            sentences.insert(place, line)
        context = "\n".join(sentences)
    asked = rng.sample(list(needles), queries)
    query = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
    template, prefix, shown = NIAH_TEMPLATE, NIAH_PREFIX, kind
    if queries * values == 1:
        template, prefix, shown = _singular(template), _singular(prefix), kind[:-1]
    template, prefix = (
        text.replace("{kind}", shown).replace("{query}", query) for text in (template, prefix)
    )
    question = template.rpartition("\n")[2]
    answers = [value for key in asked for value in needles[key]]
    return _message(template, prefix, context, question, answers)


def _singular(text: str) -> str:
    """RULER's own replacements for a single answer."""
    return text.replace("Some", "A").replace("are all", "is").replace("are", "is")


def _random(rng: random.Random, kind: str) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def _in_essay(rng: random.Random, haystack: Words, size: int, lines: Words) -> str:
    repeats = -(-size // len(haystack))
    text = " ".join((haystack * repeats)[:size])
    # RULER splits with nltk's punkt, whose model has to be downloaded.
    sentences = re.split(r"(?<=[.!?])\s+", text.strip())
    places = sorted(len(sentences) * depth // 100 for depth in rng.sample(DEPTHS, len(lines)))
    parts: Words = []
    for start, end, line in zip([0, *places], places, lines, strict=False):
        parts += [" ".join(sentences[start:end]), line]
    return " ".join([*parts, " ".join(sentences[places[-1] :])])


def essay_words(path: Path | None) -> Words:
    """Words of the essay text: a text file, or RULER's PaulGrahamEssays.json; else CPython's reference."""
    text = reference_text()
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".json":
                text = json.loads(text)["text"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EvalError(
                f"cannot use {path} as haystack: {error!r}; give a text file, or JSON with a field 'text'"
            ) from error
    words: Words = text.split()
    if not words:
        raise EvalError(f"the haystack {path} is empty")
    return words


def variable_tracking(rng: random.Random, size: int, options: SuiteOptions) -> dict[str, Any]:
    """One chain of assignments between ``size`` noise lines, behind a worked example."""
    example = _solved_chain(options, rng)
    names, value, context = _chain(rng, size, 5, str(rng.randint(10000, 99998)))
    template = VT_TEMPLATE.replace("{query}", value)
    prefix = VT_PREFIX.replace("{query}", value).replace("{count}", str(HOPS + 1))
    made = _message(template, prefix, context, template.rpartition("Question: ")[2], names)
    return {**made, "before": f"{example}\n{made['before']}"}


def _chain(rng: random.Random, size: int, letters: int, value: str) -> tuple[Words, str, str]:
    names: dict[str, None] = {}
    while len(names) < HOPS + 1:
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    chain = list(names)
    lines = [f"VAR {chain[0]} = {value}"]
    lines += [f"VAR {name} = VAR {source} " for source, name in pairwise(chain)]
    sentences = [NOISE] * size
    for shift, (place, line) in enumerate(
        zip(sorted(rng.sample(range(size), len(lines))), lines, strict=True)
    ):
        sentences.insert(place + shift, line)
    return chain, value, "\n".join(sentences).replace(". \n", ".\n")


def _solved_chain(options: SuiteOptions, rng: random.Random) -> str:
    """The worked example: at most 500 tokens, its places fixed by the seed, its names and value anew each time."""
    value = str(rng.randint(10000, 99998))
    names = {"".join(rng.choices(string.ascii_uppercase, k=3)) for _ in range(64)}
    chosen = rng.sample(sorted(names), HOPS + 1)
    text = _longest_example(options.prompts, options.seed)
    found = re.findall(r"VAR ([A-Z]{3}) =", text)
    renamed = dict(zip(found, chosen, strict=True))
    text = re.sub(r"\b[A-Z]{3}\b", lambda match: renamed.get(match[0], match[0]), text)
    return text.replace("12345", value)


@cache
def _longest_example(prompts: Prompts, seed: int) -> str:
    size = largest_size(lambda size: prompts.tokens(_example_of(seed, size)), 500, HOPS + 1, "vt's example")
    return _example_of(seed, size)


def _example_of(seed: int, size: int) -> str:
    rng = random.Random(f"{seed} example")
    names, value, context = _chain(rng, size, 3, "12345")
    while {"VAR"} & set(names):  # would be renamed with the keyword
        names, value, context = _chain(rng, size, 3, "12345")
    template = (VT_TEMPLATE + VT_PREFIX).replace("{query}", value).replace("{count}", str(HOPS + 1))
    return f"{template.replace('{context}', context)} {' '.join(names)}\n"


def common_words_task(rng: random.Random, size: int, length: int) -> dict[str, Any]:
    """A list of ``size`` different words, ten of them common, behind a worked example."""
    short = length < SHORT
    shown, common = _word_list(rng, 20, 3, 1) if short else _word_list(rng, 40, 10, 3)
    example = (CWE_TEMPLATE + CWE_PREFIX).replace("{context}", shown)
    example += " " + " ".join(f"{place}. {word}" for place, word in enumerate(common, 1))
    context, answers = _word_list(rng, size, 6, 1) if short else _word_list(rng, size, 30, 3)
    made = _message(CWE_TEMPLATE, CWE_PREFIX, context, CWE_TEMPLATE.rpartition("Question: ")[2], answers)
    return {**made, "before": f"{example}\n{made['before']}"}


def _word_list(rng: random.Random, size: int, often: int, seldom: int) -> tuple[str, Words]:
    words = rng.sample(common_words(size), size)
    listed = words[:10] * often + words[10:] * seldom
    rng.shuffle(listed)
    return " ".join(f"{place}. {word}" for place, word in enumerate(listed, 1)), words[:10]


def frequent_words_task(rng: random.Random, size: int, length: int) -> dict[str, Any]:
    """About ``size`` coded words, their frequencies falling with the square of the rank; the first are dots."""
    vocabulary: dict[str, None] = {}
    while len(vocabulary) < max(4, (length - NEW_TOKENS["fwe"]) // 50):
        vocabulary["".join(rng.choices(string.ascii_lowercase, k=6))] = None
    words = ["...", *list(vocabulary)[1:]]
    zeta = math.pi**2 / 6  # Riemann's, of alpha = 2
    coded = [word for rank, word in enumerate(words, 1) for _ in range(int(size / rank**2 / zeta))]
    rng.shuffle(coded)
    question = FWE_TEMPLATE.rpartition("Question: ")[2]
    return _message(FWE_TEMPLATE, FWE_PREFIX, " ".join(coded), question, words[1:4])


def questions(rng: random.Random, size: int, data: QaSet, index: int) -> dict[str, Any]:
    """The question's own documents among ``size`` documents."""
    query, answers = data.questions[index].query, data.questions[index].answers
    documents = data.documents_for(index, size, rng)
    context = "\n\n".join(f"Document {place}:\n{text}" for place, text in enumerate(documents, 1))
    template = QA_TEMPLATE.replace("{query}", query)
    return _message(template, QA_PREFIX, context, query, list(answers))
