"""`sgl.function` programs on a real server with drafts on: every form of call, and constrained output of every kind.

Views here are small, so that short prompts are drafted. `RAPID_SCHEMAS=500` tries that many random schemas.
"""

from __future__ import annotations

import json
import os
import random
import re

import jsonschema
import pytest
import sglang as sgl
import xgrammar
from conftest import DRAFTED, chat_ids, generate, in_parallel, reference_text, tokenizer
from rapid_sgl.programs.common import check

from rapid_sgl.http_client import ServerError
from rapid_sgl.lang import RapidEndpoint, rapid_options

TINY = {"rapid_budget": 96, "rapid_head": 16, "rapid_recent": 48}
OFF = {"rapid_drafter": "off"}
SCHEMAS = int(os.environ.get("RAPID_SCHEMAS", "16"))
TEXT = reference_text(260)


@pytest.fixture(scope="module")
def drafted(rapid_server):
    return RapidEndpoint(rapid_server.url, **TINY, **DRAFTED)


@pytest.fixture(scope="module")
def plain(rapid_server):
    return RapidEndpoint(rapid_server.url, **OFF)


@sgl.function
def forms(s, question="What is it about?"):
    s += sgl.user(f"{TEXT}\n\n{question}")
    with s.assistant():
        with rapid_options(rapid_query=question):
            s += sgl.gen("free", max_tokens=24, temperature=0)
        s += "\nIn figures: " + sgl.gen("figure", regex=r"[0-9]{1,4}(\.[0-9])?", max_tokens=12, temperature=0)
        s += "\nKind:" + sgl.select("kind", [" a manual", " a poem", " a letter"])
    forks = s.fork(2)
    for number, branch in enumerate(forks.states):
        with rapid_options(rapid_draft_length=number + 1):
            branch += sgl.user("Say more.") + sgl.assistant(sgl.gen("more", max_tokens=12, temperature=0))
    forks.join()
    s += "\n" + sgl.gen("object", json_schema=json.dumps(SMALL), max_tokens=40, temperature=0)


SMALL = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["text", "code"]},
        "pages": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["kind", "pages"],
    "additionalProperties": False,
}
NAMES = ("free", "figure", "kind", "more", "object")


def values(state):
    check(state)
    return {name: state[name] for name in NAMES}


def test_every_form_of_call_says_what_the_target_alone_says(drafted, plain):
    questions = [{"question": "What is it about?"}, {"question": "Which keyword is explained?"}]
    one = forms.run(backend=drafted)
    batch = forms.run_batch(questions, backend=drafted, num_threads=2)
    stream = forms.run(backend=drafted, stream=True)
    shown = "".join(stream.text_iter())
    expected = [values(state) for state in forms.run_batch(questions, backend=plain, num_threads=2)]
    assert [values(state) for state in batch] == expected
    assert values(one) == values(stream) == expected[0]
    assert shown == stream.text() == one.text()
    jsonschema.validate(json.loads(one["object"]), SMALL)
    assert re.fullmatch(r"[0-9]{1,4}(\.[0-9])?", one["figure"])


def test_accept_statistics_reach_the_program(drafted, plain):
    for stream in (False, True):
        state = forms.run(backend=drafted, stream=stream)
        "".join(state.text_iter())
        meta = state.get_meta_info("free")
        assert meta["spec_accept_length"] > 1 and meta["rapid_drafter"] == "view"
        assert meta["completion_tokens"] > meta["spec_verify_ct"]
        assert meta["rapid_spans"] and meta["rapid_spans"][-1] <= meta["prompt_tokens"] - 48
    meta = forms.run(backend=plain).get_meta_info("free")
    assert meta["spec_verify_ct"] == meta["completion_tokens"] - 1  # the first token is the prefill's
    assert "rapid_spans" not in meta


@sgl.function
def question(s):
    s += sgl.user(TEXT) + sgl.assistant(sgl.gen("answer", max_tokens=4))


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_names_its_reason(drafted, stream):
    with rapid_options(rapid_draft_length=32), pytest.warns(UserWarning, match="rapid_draft_length=32"):
        state = question.run(backend=drafted, stream=stream)
        "".join(state.text_iter())
    with pytest.raises(ServerError, match="rapid_draft_length=32 exceeds the server's"):
        check(state)


EBNF = 'root ::= "[" pair ("," pair){0,3} "]"\npair ::= name ":" digit{1,3}\nname ::= [a-z]{1,6}\ndigit ::= [0-9]'
REGEX = r"\([0-9]{3}\) [0-9]{3}-[0-9]{4}"
LIST = {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 3}
CONSTRAINTS = [
    ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text)),
    ({"regex": "(yes|no)"}, lambda text: text in ("yes", "no")),
    ({"ebnf": EBNF}, lambda text: re.fullmatch(r"\[[a-z]{1,6}:\d{1,3}(,[a-z]{1,6}:\d{1,3}){0,3}\]", text)),
    ({"json_schema": json.dumps(SMALL)}, lambda text: jsonschema.validate(json.loads(text), SMALL) is None),
    ({"json_schema": json.dumps(LIST)}, lambda text: jsonschema.validate(json.loads(text), LIST) is None),
    ({}, lambda text: text),  # an unconstrained neighbour in the same batch
]


@pytest.fixture(scope="module")
def begins():
    """Whether a text is the beginning of a document that the schema allows."""
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer(), vocab_size=len(tokenizer()))
    compiler = xgrammar.GrammarCompiler(info)
    return lambda schema, text: xgrammar.GrammarMatcher(compiler.compile_json_schema(schema)).accept_string(
        text
    )


def test_constrained_batch_is_the_targets_and_parses(rapid_server, begins):
    """All kinds in one batch, greedy ones beside sampled ones. A JSON schema allows spaces without end between
    its values, so that a sampled document may be cut off: what there is of it must be a beginning then."""
    ids = chat_ids(TEXT, "Give an example.")

    def ask(task):
        number, temperature, options = task
        constraint, _ = CONSTRAINTS[number]
        return generate(rapid_server, ids, 64, temperature=temperature, **constraint, **options)

    numbers = range(len(CONSTRAINTS))
    tasks = [(n, temperature, TINY) for n in numbers for temperature in (0, 1.0)]
    answers = in_parallel(len(tasks), ask, tasks)
    for (number, temperature, _), answer in zip(tasks, answers, strict=True):
        constraint, parses = CONSTRAINTS[number]
        text, schema = answer["text"], constraint.get("json_schema")
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            assert parses(text), text
        else:
            assert not constraint or (temperature and schema and begins(schema, text)), text
    greedy = in_parallel(len(numbers), ask, [(n, 0, OFF) for n in numbers])
    assert [answer["text"] for answer in answers[::2]] == [answer["text"] for answer in greedy]
    assert sum(answer["meta_info"]["spec_verify_ct"] for answer in answers[::2]) < sum(
        answer["meta_info"]["completion_tokens"] for answer in answers[::2]
    )


def random_schema(chance, depth=2):
    """A schema whose values are of bounded length."""
    kinds = ["boolean", "integer", "string", "enum", "null", "choice"] + ["array", "object"] * (depth > 0)
    kind = "object" if depth == 2 else chance.choice(kinds)
    if kind == "integer":
        low = chance.randrange(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + chance.randrange(1, 200)}
    if kind == "string":
        return {"type": "string", "minLength": 1, "maxLength": chance.randrange(2, 9)}
    if kind == "enum":
        return {"enum": chance.sample(["red", "blue", 1, 2.5, None, "a b", 'quo"te', "é"], 3)}
    if kind == "choice":
        return {"anyOf": [random_schema(chance, 0), random_schema(chance, 0)]}
    if kind == "array":
        least = chance.randrange(0, 2)
        items = random_schema(chance, depth - 1)
        return {
            "type": "array",
            "items": items,
            "minItems": least,
            "maxItems": least + chance.randrange(1, 3),
        }
    if kind == "object":
        names = chance.sample(["name", "size", "is_open", "tags", "é", "a b", "x1"], chance.randrange(1, 4))
        required = [name for name in names if chance.random() < 0.7]
        properties = {name: random_schema(chance, depth - 1) for name in names}
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }
    return {"type": kind}


def test_random_schemas(rapid_server, begins):
    """Greedy and sampled by turns; greedy ones equal the target's. What the model does not close in time is the
    beginning of a document that the schema allows."""
    ids = chat_ids(TEXT, "Describe it as JSON.")
    schemas = [random_schema(random.Random(seed)) for seed in range(SCHEMAS)]

    def ask(task):
        seed, options = task
        schema = json.dumps(schemas[seed])
        sampling = {"temperature": float(seed % 2), "sampling_seed": seed}
        return generate(rapid_server, ids, 80, json_schema=schema, **sampling, **options)

    drafted = in_parallel(12, ask, [(seed, TINY) for seed in range(SCHEMAS)])
    whole = 0
    for schema, answer in zip(schemas, drafted, strict=True):
        text = answer["text"]
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            jsonschema.validate(json.loads(text), schema)
            whole += 1
        assert begins(json.dumps(schema), text), (schema, text)
    assert whole > 0.6 * SCHEMAS
    greedy = range(0, SCHEMAS, 2)
    target = in_parallel(12, ask, [(seed, OFF) for seed in greedy])
    assert [drafted[seed]["output_ids"] for seed in greedy] == [answer["output_ids"] for answer in target]
