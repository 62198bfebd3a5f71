"""Scores of free text as the official harnesses reckon them: F1 of words, two ROUGE-L, edit similarity.

Written anew; the semantics, odd corners included, are those of the packages that the harnesses
import: ``rouge`` 1.0.1 and ``fuzzywuzzy`` (LongBench), ``rouge_score`` 0.1.2 (InfiniteBench).
Texts in Chinese are cut into words by ``jieba``, which has to be installed for those tasks.
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Sequence

from rapid_sgl.eval import EvalError

_CHINESE_PUNCTUATION = "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation, articles and surplus white space."""
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def normalize_chinese(text: str) -> str:
    """Lower case, without any punctuation and white space."""
    kept = (char for char in text.lower() if char not in string.punctuation + _CHINESE_PUNCTUATION)
    return "".join("".join(kept).split())


def token_f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """F1 of two bags of tokens; 0 where they share none."""
    same = sum((Counter(prediction) & Counter(reference)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(prediction), same / len(reference)
    return 2 * precision * recall / (precision + recall)


def qa_f1(prediction: str, reference: str) -> float:
    """F1 of normalised words."""
    return token_f1(normalize_answer(prediction).split(), normalize_answer(reference).split())


def qa_f1_chinese(prediction: str, reference: str) -> float:
    """F1 of normalised jieba words."""
    words = ([normalize_chinese(word) for word in chinese_words(text)] for text in (prediction, reference))
    left, right = ([word for word in found if word] for found in words)
    return token_f1(left, right)


def chinese_words(text: str) -> list[str]:
    """Words as jieba cuts them.

    Raises:
        EvalError: jieba is not installed.
    """
    try:
        import jieba
    except ImportError:
        raise EvalError(
            "LongBench cuts Chinese answers into words with jieba; install it with `pip install jieba`, or "
            "leave the Chinese tasks out"
        ) from None
    return list(jieba.cut(text, cut_all=False))


def edit_similarity(prediction: str, reference: str) -> float:
    """``fuzzywuzzy.fuzz.ratio`` / 100: difflib's ratio in whole percent, 0 where a text is empty."""
    if prediction == reference:
        return 1.0
    if not prediction or not reference:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, prediction, reference).ratio()) / 100


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L of ``rouge`` 1.0.1: sentences end at full stops, different words count once; 0 for empty texts."""
    found, wanted = _sentences(prediction), _sentences(reference)
    if not found or not wanted:
        return 0.0
    common = {
        words[place] for words in wanted for other in found for place in _common(words, other, later=False)
    }
    precision = len(common) / len({word for words in found for word in words})
    recall = len(common) / len({word for words in wanted for word in words})
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_chinese(prediction: str, reference: str) -> float:
    """ROUGE-L of jieba words."""
    return rouge_l(" ".join(chinese_words(prediction)), " ".join(chinese_words(reference)))


def rouge_l_sum(prediction: str, reference: str) -> float:
    """rougeLsum of ``rouge_score`` without stemming, as Hugging Face's ``evaluate`` reckons it: lines are sentences."""
    found, wanted = (
        [re.findall(r"[a-z0-9]+", line.lower()) for line in text.split("\n") if line]
        for text in (prediction, reference)
    )
    left = Counter(word for line in found for word in line)
    right = Counter(word for line in wanted for word in line)
    if not left or not right:
        return 0.0
    precise, wide, hits = left.total(), right.total(), 0
    for line in wanted:
        places = sorted({place for other in found for place in _common(line, other, later=True)})
        for word in (line[place] for place in places):
            if left[word] > 0 and right[word] > 0:
                hits += 1
                left[word] -= 1
                right[word] -= 1
    precision, recall = hits / precise, hits / wide
    return 2 * precision * recall / (precision + recall) if hits else 0.0


def _sentences(text: str) -> list[list[str]]:
    """Words of each sentence; one of only white space is the empty word, as in ``rouge``."""
    return [sentence.split() or [""] for sentence in text.split(".") if sentence]


def _common(reference: Sequence[str], other: Sequence[str], *, later: bool) -> list[int]:
    """Places in ``reference`` of a longest common subsequence.

    Args:
        later: of several, which one: where both steps are as good, step back in ``reference``
            (rouge_score) or in ``other`` (rouge).
    """
    rows, columns = len(reference), len(other)
    table = [[0] * (columns + 1) for _ in range(rows + 1)]
    for row in range(1, rows + 1):
        here, above, word = table[row], table[row - 1], reference[row - 1]
        for column in range(1, columns + 1):
            if word == other[column - 1]:
                here[column] = above[column - 1] + 1
            else:
                here[column] = max(above[column], here[column - 1])
    places, row, column = [], rows, columns
    while row and column:
        up, left = table[row - 1][column], table[row][column - 1]
        if reference[row - 1] == other[column - 1]:
            places.append(row - 1)
            row, column = row - 1, column - 1
        elif up > left or (later and up == left):
            row -= 1
        else:
            column -= 1
    return places[::-1]
