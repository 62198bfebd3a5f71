"""Samples: what the generators make, what is read from the official files, and the prompts around them."""

import json
import re
from dataclasses import replace

import pytest

from rapid_sgl.cli.asking import load_builder
from rapid_sgl.eval import EvalError
from rapid_sgl.eval.infinitebench import InfiniteBench
from rapid_sgl.eval.longbench import LongBench, LongBenchV2
from rapid_sgl.eval.longbench_prompts import NEW_TOKENS, PROMPTS
from rapid_sgl.eval.prompts import Prompts
from rapid_sgl.eval.ruler import NIAH, Ruler
from rapid_sgl.eval.samples import Sample, SuiteOptions, read_jsonl
from rapid_sgl.models import embedded_model_path

GENERATED = [(Ruler, task) for task in Ruler.default_tasks] + [
    (InfiniteBench, task) for task in InfiniteBench.default_tasks
]


@pytest.fixture(scope="module")
def prompts():
    return Prompts(load_builder(str(embedded_model_path())).tokenizer)


def make(suite, task, prompts, **options):
    return suite().samples(task, SuiteOptions(prompts, **{"lengths": (1024,), "count": 2, **options}))


@pytest.mark.parametrize(("suite", "task"), GENERATED)
def test_generated_samples_fill_the_length_and_hold_their_answers(suite, task, prompts):
    samples = make(suite, task, prompts)
    for sample in samples:
        assert 700 < prompts.length(sample) <= 1024
        assert sample.answers and all(answer in sample.context for answer in sample.answers)
        assert sample.question in sample.after or task == "kv_retrieval"
    assert samples[0].context != samples[1].context or samples[0].answers != samples[1].answers


@pytest.mark.parametrize(("suite", "task"), GENERATED)
def test_a_sample_is_the_same_however_many_are_made(suite, task, prompts):
    two = make(suite, task, prompts)
    assert make(suite, task, prompts, count=3)[:2] == two
    assert make(suite, task, prompts, seed=43)[0] != two[0]


def test_needles_are_as_many_as_the_task_says(prompts):
    for task, (hay, _, kind, keys, values, queries) in NIAH.items():
        (sample,) = make(Ruler, task, prompts, count=1)
        found = re.findall(rf"special magic {kind} for (\S+) is: (\S+)\.", sample.context)
        if hay != "needle":
            assert len(found) == keys * values, task
        assert len(sample.answers) == values * queries
        assert {value for key, value in found if key in sample.question} == set(sample.answers)
        assert sample.before.startswith("A special" if queries * values == 1 else "Some special")


def test_a_chain_of_variables_leads_from_the_value_to_every_answer(prompts):
    (sample,) = make(Ruler, "vt", prompts, count=1)
    value = re.search(r"the value (\d+) in", sample.question)[1]
    assigned = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", sample.context))
    assert len(assigned) == 5
    for name in sample.answers:
        while name in assigned:
            name = assigned[name]
        assert name == value
    # the worked example is solved and has other names
    example = sample.before.split("Memorize")[1]
    solution = example.rstrip().split("they are: ")[1].split()
    assert len(solution) == 5 and not set(solution) & set(sample.answers)
    assert dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", example)).keys() == set(solution)


def test_common_words_are_the_most_common(prompts):
    (sample,) = make(Ruler, "cwe", prompts, count=1)
    words = re.findall(r"\d+\. (\w+)", sample.context)
    assert {word for word in words if words.count(word) == 6} == set(sample.answers)
    assert all(words.count(word) == 1 for word in words if word not in sample.answers)
    (sample,) = make(Ruler, "fwe", prompts, count=1)
    coded = sample.context.split()
    order = sorted(set(coded), key=coded.count, reverse=True)
    assert order[:4] == ["...", *sample.answers]


def test_lengths_that_are_too_short_are_refused(prompts):
    with pytest.raises(EvalError, match="niah_single_1 at length 100 does not fit"):
        make(Ruler, "niah_single_1", prompts, lengths=(100,))


def test_an_essay_of_the_users_is_the_hay(prompts, tmp_path):
    path = tmp_path / "essays.json"
    path.write_text(json.dumps({"text": "Zebras sleep. " * 9}))
    (sample,) = make(Ruler, "niah_single_2", prompts, count=1, haystack=path)
    assert set(re.sub(r"One of .*?\.", "", sample.context).split()) == {"Zebras", "sleep."}
    path.write_text("[]")
    with pytest.raises(EvalError, match="haystack"):
        make(Ruler, "niah_single_2", prompts, haystack=path)


def test_questions_from_squad_and_hotpotqa(prompts, tmp_path):
    def paragraph(number, possible):
        answers = [{"text": f"answer {number}"}]
        qas = [{"question": f"Who is {number}?", "answers": answers, "is_impossible": not possible}]
        return {"context": f"Text {number} is about answer {number}.", "qas": qas}

    squad = {"data": [{"paragraphs": [paragraph(n, n != 1) for n in range(i, i + 4)]} for i in (0, 4, 8)]}
    (tmp_path / "squad.json").write_text(json.dumps(squad))
    first, second = make(Ruler, "qa_1", prompts, lengths=(420,), data=tmp_path)
    assert (first.question, first.answers) == ("Who is 0?", ["answer 0"])
    assert second.question == "Who is 2?"  # 1 cannot be answered
    assert all(f"Text {n} is" in first.context for n in range(4))  # its own article comes first
    hotpot = [
        {"question": f"Q{n}?", "answer": f"A{n}", "context": [[f"T{n}", ["One.", " Two."]], ["Same", ["."]]]}
        for n in range(9)
    ]
    (tmp_path / "hotpotqa.json").write_text(json.dumps(hotpot))
    (sample,) = make(Ruler, "qa_2", prompts, lengths=(250,), count=1, data=tmp_path)
    assert sample.answers == ["A0"] and "T0\nOne. Two." in sample.context
    with pytest.raises(EvalError, match="--samples 9"):
        make(Ruler, "qa_2", prompts, lengths=(250,), count=10, data=tmp_path)
    with pytest.raises(EvalError, match=r"squad\.json.*--data"):
        make(Ruler, "qa_1", prompts)


def test_infinitebench_reads_its_files(prompts, tmp_path):
    choice = {
        "id": 0,
        "context": "Book.",
        "input": "Who?",
        "answer": ["Ann"],
        "options": ["Al", "Ann", "Bo", "Cy"],
    }
    (tmp_path / "longbook_choice_eng.jsonl").write_text(json.dumps(choice) + "\n")
    (sample,) = make(InfiniteBench, "longbook_choice_eng", prompts, data=tmp_path)
    assert sample.answers == ["Ann", "B"] and "Question: Who?" in sample.after and "B. Ann" in sample.after
    assert sample.system == "You are a helpful assistant" and sample.max_new_tokens == 64
    plain = Prompts(prompts.tokenizer, chat=False)
    (sample,) = make(InfiniteBench, "longbook_choice_eng", plain, data=tmp_path)
    assert sample.after.endswith("The letter of the correct answer is") and sample.max_new_tokens == 40
    choice["answer"] = ["Nobody"]
    (tmp_path / "longbook_choice_eng.jsonl").write_text(json.dumps(choice))
    with pytest.raises(EvalError, match="item 1: the answer"):
        make(InfiniteBench, "longbook_choice_eng", prompts, data=tmp_path)


def test_longbench_reads_its_files(prompts, tmp_path):
    item = {"input": "Who?", "context": "{x} $y", "answers": ["me"], "length": 5000, "all_classes": None}
    for name in ("hotpotqa", "samsum_e"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(item) + "\n")
    (sample,) = make(LongBench, "hotpotqa", prompts, data=tmp_path)
    message = sample.before + sample.context + sample.after
    assert message == PROMPTS["hotpotqa"].format(context="{x} $y", input="Who?")
    assert (sample.group, sample.chat, sample.max_new_tokens) == ("all", True, NEW_TOKENS["hotpotqa"])
    (sample,) = make(LongBench, "samsum_e", prompts, data=tmp_path)
    assert (sample.group, sample.chat, sample.stop_at_newline) == ("4-8k", False, True)
    assert prompts.tokenizer.decode(prompts.build(sample).ids).startswith("Summarize the dialogue")


def test_v2_reads_its_file(prompts, tmp_path):
    item = {
        "_id": "k",
        "difficulty": "easy",
        "length": "short",
        "question": "Q?",
        "answer": "B",
        "context": " doc ",
    }
    item |= {f"choice_{letter}": f"choice {letter}" for letter in "ABCD"}
    (tmp_path / "data.json").write_text(json.dumps([item]))
    (sample,) = make(LongBenchV2, "longbench_v2", prompts, data=tmp_path)
    assert (sample.id, sample.group, sample.context) == ("longbench_v2/k", "short", "doc")
    assert "this question: Q?\nChoices:\n(A) choice A\n(B) choice B" in sample.after
    prompt = prompts.build(sample)
    short = prompts.build_excerpt(sample, prompt, [prompt.context], 400)
    text = short.message.text
    assert "following retrieved text chunks" in text and "Retrieved chunk 1: doc" in text


def test_a_bad_line_is_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2')
    with pytest.raises(EvalError, match=r"x\.jsonl, line 3: not JSON"):
        list(read_jsonl(path, ["a"]))
    path.write_text('{"a": "\u2028"}\n[1]\n')
    with pytest.raises(EvalError, match="line 2: not a JSON object"):
        list(read_jsonl(path, ["a"]))
    path.write_text('{"b": 1}\n')
    with pytest.raises(EvalError, match="line 1: no field 'a'"):
        list(read_jsonl(path, ["a"]))


def sample_of(context):
    return Sample("s", "t", "all", "Read this. ", context, " What is it?", "What is it?", ["x"], 8)


def test_long_prompts_lose_their_middle(prompts):
    context = " ".join(f"word{number}" for number in range(600))
    whole = prompts.build(sample_of(context))
    assert whole.text(whole.context).strip() == context
    cut = prompts.build(sample_of(context), limit=200)
    assert 190 <= len(cut) <= 200
    text = cut.message.text
    assert text.startswith("Read this. word0 word1 ") and text.endswith("word599 What is it?")
    left, right = text.split("word0", 1)[1], text.rsplit("word599", 1)[0]
    assert abs(len(left) - len(right)) < 30 and "word300" not in text
    assert cut.text(cut.context).strip().startswith("word0") and cut.text(cut.context).endswith("word599")
    with pytest.raises(EvalError, match="no room"):
        prompts.build(sample_of(context), limit=20)


def test_chunks_tile_the_context_and_nothing_else(prompts):
    prompt = prompts.build(sample_of(" ".join(f"word{number}" for number in range(300))))
    assert (prompt.chunks[0].start, prompt.chunks[-1].end) == prompt.context
    assert "".join(piece.text for piece in prompt.chunks) == prompt.text(prompt.context)
    assert "Read" not in prompt.chunks[0].text and "What" not in prompt.chunks[-1].text


def test_excerpts_keep_the_question_and_the_budget(prompts):
    sample = sample_of("\n\n".join(f"Paragraph {number} says something." for number in range(200)))
    prompt = prompts.build(sample)
    room = prompts.excerpt_room(sample, 200)
    first, last = prompt.context
    short = prompts.build_excerpt(sample, prompt, [(first, first + room // 2), (last - room // 2, last)], 200)
    assert 150 < len(short) <= 200
    assert "Paragraph 0 " in short.message.text and "Paragraph 199 " in short.message.text
    assert short.message.text.endswith("What is it?")
    assert len(prompts.build_excerpt(sample, prompt, [], 200)) <= 200  # nothing was found


def test_the_answer_begins_as_ruler_wants_it(prompts):
    (sample,) = make(Ruler, "vt", prompts, count=1)
    text = prompts.tokenizer.decode(prompts.build(sample).ids)
    assert text.endswith(f"<|im_end|>\n<|im_start|>assistant\n{sample.answer_prefix}")
    plain = Prompts(prompts.tokenizer, chat=False)
    text = plain.tokenizer.decode(plain.build(sample).ids)
    assert text.endswith(sample.after + sample.answer_prefix) and "<|im_start|>" not in text
    system = replace(sample, system="Be brief.")
    assert "<|im_start|>system\nBe brief." in prompts.tokenizer.decode(prompts.build(system).ids)
