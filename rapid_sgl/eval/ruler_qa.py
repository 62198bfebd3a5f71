"""RULER's question answering: SQuAD and HotpotQA from the user's files, among distracting documents.

Reads the files that NVIDIA/RULER (Apache-2.0) downloads, as its scripts/data/synthetic/qa.py does.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapid_sgl.eval import EvalError


@dataclass(frozen=True)
class Question:
    query: str
    answers: tuple[str, ...]
    own: tuple[int, ...]  # documents that come with it, always shown
    near: tuple[int, ...] = ()  # of the same article, shown before others


@dataclass(frozen=True)
class QaSet:
    """Questions and all documents."""

    documents: list[str]
    questions: list[Question]

    def __len__(self) -> int:
        return len(self.questions)

    @property
    def gold(self) -> int:
        """The most documents that a question brings itself."""
        return max(len(question.own) for question in self.questions)

    def documents_for(self, index: int, size: int, rng: random.Random) -> list[str]:
        """``size`` documents in random order, the question's own among them."""
        question, total = self.questions[index], len(self.documents)
        own, near, room = list(question.own), list(question.near), size - len(question.own)
        if size >= total:
            texts = (self.documents * -(-size // total))[:size]
        else:
            if room > len(near):
                taken = {*own, *near}
                others = [place for place in range(total) if place not in taken]
                chosen = near + rng.sample(others, room - len(near))
            else:
                chosen = rng.sample(near, max(0, room))
            texts = [self.documents[place] for place in own + chosen]
        rng.shuffle(texts)
        return texts


def read_squad(path: Path) -> QaSet:
    """SQuAD 2.0's dev set; questions without an answer are left out."""
    articles = _load(path, "SQuAD")["data"]
    try:
        contexts = [[part["context"] for part in article["paragraphs"]] for article in articles]
        documents = sorted({text for texts in contexts for text in texts})
        places = {text: place for place, text in enumerate(documents)}
        questions = []
        for article, texts in zip(articles, contexts, strict=True):
            for part in article["paragraphs"]:
                own = places[part["context"]]
                near = tuple(places[text] for text in texts if places[text] != own)
                for item in part["qas"]:
                    if not item["is_impossible"]:
                        answers = tuple(answer["text"] for answer in item["answers"])
                        questions.append(Question(item["question"], answers, (own,), near))
    except (KeyError, TypeError) as error:
        raise EvalError(f"{path} is not SQuAD 2.0's dev file: {error!r}") from error
    return _checked(path, documents, questions)


def read_hotpotqa(path: Path) -> QaSet:
    """HotpotQA's dev set with distractors."""
    items = _load(path, "HotpotQA")
    try:
        own = [[f"{title}\n{''.join(parts)}" for title, parts in item["context"]] for item in items]
        documents = sorted({text for texts in own for text in texts})
        places = {text: place for place, text in enumerate(documents)}
        questions = [
            Question(item["question"], (item["answer"],), tuple(places[text] for text in texts))
            for item, texts in zip(items, own, strict=True)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise EvalError(f"{path} is not HotpotQA's dev file: {error!r}") from error
    return _checked(path, documents, questions)


def _load(path: Path, what: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvalError(f"cannot read {what} from {path}: {error}") from error


def _checked(path: Path, documents: list[str], questions: list[Question]) -> QaSet:
    if not questions:
        raise EvalError(f"{path} holds no question with an answer")
    return QaSet(documents, questions)
