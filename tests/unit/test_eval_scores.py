"""Scores on hand-made cases, one per branch of the official harnesses."""

import pytest

from rapid_sgl.eval import EvalError
from rapid_sgl.eval.infinitebench import InfiniteBench
from rapid_sgl.eval.longbench import LongBench, LongBenchV2, chosen_letter
from rapid_sgl.eval.metrics import edit_similarity, qa_f1, rouge_l, rouge_l_sum
from rapid_sgl.eval.ruler import Ruler
from rapid_sgl.eval.samples import Sample


def score(suite, task, answer, answers, **extra):
    sample = Sample("id", task, "all", "", "", "", "", answers, 1, extra=extra)
    return suite().score(sample, answer)


@pytest.mark.parametrize(
    ("answer", "answers", "expected"),
    [
        ("12 and 34", ["12", "34"], 1.0),
        ("only 34", ["12", "34"], 0.5),
        ("ab-CD", ["AB-cd"], 1.0),  # case does not count
        ("12\t34\x00", ["12\t34"], 0.0),  # control characters become line breaks
        ("", ["12"], 0.0),
        ("1234", ["23"], 1.0),  # parts of words count
    ],
)
def test_ruler_counts_the_references_found(answer, answers, expected):
    assert score(Ruler, "niah_multivalue", answer, answers) == expected


def test_ruler_questions_need_one_reference():
    assert score(Ruler, "qa_1", "it was Paris", ["London", "paris"]) == 1
    assert score(Ruler, "qa_2", "it was Rome", ["London", "paris"]) == 0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("The pass key is 71432.", 1), ("71432", 1), ("5, no, 71432", 0), ("x714329", 0), ("none", 0), ("", 0)],
)
def test_passkey_takes_the_first_run_of_digits(answer, expected):
    for task in ("passkey", "number_string"):
        assert score(InfiniteBench, task, answer, ["71432"]) == expected


def test_kv_needs_the_value_as_a_word():
    for answer, expected in (
        ('The value is: "a-1".', 1), ("{a-1}", 1), ("xa-1", 0), ("a-1;", 0), ("(a-1)", 0), ("", 0),
    ):  # fmt: skip
        assert score(InfiniteBench, "kv_retrieval", answer, ["a-1"]) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("", 0),
        ("  B. Hall Farm", 1),  # the first letter decides
        ("A. Hall Farm", 0),
        ("Apples", 0),  # also when it begins a word
        ("Hall Farm", 1),  # the option's text
        ("I think the answer is: B", 1),
        ("I think the answer is: C", 0),
        ("so the answer is Hall Farm", 1),
        ("so the answer is:", 0),  # ends with the words
        ("so the answer is", 0),
        ('"the option is   B"', 1),  # quotes and double blanks go first
        ("well, answer: B", 1),
        ("it is B, I think", 1),  # the first word that is one of the letters
        ("it is C, not B", 0),
        ("it is AB", 0),
        ("no idea", 0),
    ],
)
def test_choice_follows_the_official_order_of_rules(answer, expected):
    assert score(InfiniteBench, "longbook_choice_eng", answer, ["Hall Farm", "B"]) == expected


def test_book_answers_take_the_best_reference():
    assert score(InfiniteBench, "longbook_qa_eng", "The war!", ["peace", "a war"]) == 1
    assert score(InfiniteBench, "longbook_qa_eng", "war years", ["the war"]) == pytest.approx(2 / 3)
    summary = score(InfiniteBench, "longbook_sum_eng", "a b\nc d", ["a b c d", "x"])
    assert summary == 1  # both lines are found in the one reference line


def test_f1_normalises_and_counts_words_as_often_as_both_have_them():
    assert qa_f1("The cat, the CAT", "cat") == pytest.approx(2 / 3)
    assert qa_f1("dog", "cat") == 0 and qa_f1("the", "a") == 0  # articles alone leave nothing


def test_rouge_l_of_longbench_counts_different_words_once():
    # two different words of three in common, in order; repetitions do not count
    assert rouge_l("the cat sat", "the the cat ran") == pytest.approx(2 / 3, abs=1e-6)
    assert rouge_l("cat the", "the cat") == pytest.approx(0.5, abs=1e-6)  # a common subsequence of one
    # sentences end at full stops, and each is compared with each
    assert rouge_l("cat. the", "the cat") == pytest.approx(1, abs=1e-6)
    assert rouge_l("", "x") == rouge_l(".", "x") == rouge_l("x", "") == 0


def test_rouge_l_sum_splits_lines_and_counts_each_word_once():
    assert rouge_l_sum("cat the", "the cat") == pytest.approx(0.5)
    assert rouge_l_sum("cat\nthe", "the cat") == 1
    assert rouge_l_sum("The CAT!", "the cat") == 1  # lower case, letters and digits only
    assert rouge_l_sum("the\nthe", "the\ncat") == pytest.approx(0.5)
    assert rouge_l_sum("", "x") == rouge_l_sum("!", "x") == 0


def test_edit_similarity_is_in_whole_percent():
    assert edit_similarity("abcd", "abcx") == 0.75
    assert edit_similarity("abc", "abd") == 0.67
    assert edit_similarity("", "") == 1 and edit_similarity("", "a") == 0


@pytest.mark.parametrize(
    ("task", "answer", "answers", "expected"),
    [
        ("hotpotqa", "Paris", ["London", "paris."], 1),
        ("hotpotqa", "Paris\nParis", ["paris"], 2 / 3),  # all lines count
        ("triviaqa", "\nParis\nQuestion: next", ["paris"], 1),  # the first line does
        ("passage_count", "3 or 4", ["3"], 0.5),
        ("passage_count", "none", ["3"], 0),
        ("passage_retrieval_en", "Paragraph 12", ["Paragraph 12"], 1),
        ("passage_retrieval_en", "12, 7, 3", ["Paragraph 12"], 1 / 3),
        ("passage_retrieval_zh", "段落7", ["段落7"], 1),
        ("lcc", "```python\n# comment\nx = 1\ny", ["x = 1"], 1),  # the first line that is code
        ("lcc", "// a", ["x"], 0),
        ("hotpotqa_e", "Paris", ["paris"], 1),
        ("gov_report", "a b", ["a b"], 1),
    ],
)
def test_longbench_tasks(task, answer, answers, expected):
    assert score(LongBench, task, answer, answers) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Location: city", 1.0),  # "city" alone is part of the right one's name and does not count
        ("Location: city, Date", 0.5),
        ("city", 0.0),
        ("none", 0.0),
        ("Location: city\nDate", 1.0),  # the first line only
    ],
)
def test_classes_named_beside_the_right_one_share_the_point(answer, expected):
    classes = ["city", "Date", "Location: city"]
    assert score(LongBench, "trec", answer, ["Location: city"], classes=classes) == expected


def test_of_two_class_names_within_the_right_one_the_official_loop_skips_the_second():
    classes = ["a", "b", "a b"]
    assert score(LongBench, "trec", "a b", ["a b"], classes=classes) == 0.5


def test_a_reference_without_a_paragraph_is_named():
    with pytest.raises(EvalError, match="'Page 3'"):
        score(LongBench, "passage_retrieval_en", "3", ["Page 3"])


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("The correct answer is (B).", "B"),
        ("**The correct answer is C**", "C"),
        ("The correct answer is A. No: The correct answer is (D)", "D"),  # parentheses first
        ("the correct answer is (A)", None),
        ("The correct answer is E", None),
        ("B", None),
        ("", None),
    ],
)
def test_v2_takes_only_the_form_that_was_asked_for(answer, letter):
    assert chosen_letter(answer) == letter
    assert score(LongBenchV2, "longbench_v2", answer, "B") == (letter == "B")
