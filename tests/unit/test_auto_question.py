"""Which question a rendered chat ends with, under chat templates of several families."""

import pytest

from rapid_sgl.models import embedded_model_path
from rapid_sgl.retrieval.auto import QUESTION_CHARS, question, turn_marks

# Each in the manner of a model family: what it does with system, tool and generation prompts differs.
CHATML_TOOL_AS_USER = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
HEADERS = (
    "{{ '<|begin|>' }}{% for m in messages %}<|header|>{{ m.role }}<|end_header|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|header|>assistant<|end_header|>\n\n{% endif %}"
)
INST = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
)
PLAIN_WORDS = (
    "{% for m in messages %}### {{ m.role | capitalize }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
SUPPORT_TOOLS = (CHATML_TOOL_AS_USER, HEADERS, PLAIN_WORDS)


@pytest.fixture(scope="module")
def embedded():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded_model_path())


@pytest.fixture
def tokenizer(embedded):
    template = embedded.chat_template
    yield embedded
    embedded.chat_template = template


def asked(tokenizer, *messages):
    """The question found in a chat; roles by their first letter."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    chat = [{"role": roles[role], "content": content} for role, content in messages]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return question(text, turn_marks(tokenizer))


WHICH = "Which ship carried the chronometer?"
DOCUMENT = "The harbour was quiet that night, and nobody saw the boats leave.\n\n" * 40


@pytest.mark.parametrize("template", [None, CHATML_TOOL_AS_USER, HEADERS, INST, PLAIN_WORDS])
def test_last_user_turn(tokenizer, template):
    if template is not None:
        tokenizer.chat_template = template
    assert asked(tokenizer, ("u", WHICH)) == WHICH
    assert asked(tokenizer, ("u", f"{DOCUMENT}{WHICH}")) == WHICH
    assert asked(tokenizer, ("u", DOCUMENT), ("a", "I have read it."), ("u", WHICH)) == WHICH


@pytest.mark.parametrize("template", [None, *SUPPORT_TOOLS])
def test_tool_results_are_not_questions(tokenizer, template):
    if template is not None:
        tokenizer.chat_template = template
    result = "The file says: harbour, harbour, harbour."
    call = ("a", "search(harbour)")
    assert asked(tokenizer, ("u", WHICH), call, ("t", result)) == WHICH
    assert asked(tokenizer, ("u", "Hello there"), call, ("t", result), ("a", "Yes?"), ("u", WHICH)) == WHICH


def test_system_prompt_of_ones_own(tokenizer):
    assert asked(tokenizer, ("s", DOCUMENT), ("u", WHICH)) == WHICH


def test_tail_of_a_long_turn(tokenizer):
    end = "and so the crew sailed on through the fog " * 40
    found = asked(tokenizer, ("u", f"{WHICH}\n{end}"))
    assert end.endswith(found + " ") and QUESTION_CHARS - 10 < len(found) <= QUESTION_CHARS
    line = "x" * 5000  # without a word boundary
    assert asked(tokenizer, ("u", line)) == line[-QUESTION_CHARS:]


def test_short_last_paragraph_takes_the_one_before(tokenizer):
    text = f"{DOCUMENT}{WHICH}\n\nAnswer:"
    assert question(text, None) == f"{WHICH}\n\nAnswer:"
    assert asked(tokenizer, ("u", text)) == f"{WHICH}\n\nAnswer:"
    assert question("哪艘船带着航海钟？", None) == "哪艘船带着航海钟？"
    for short in ("Who painted the lighthouse?", "من رسم المنارة؟"):
        assert question(f"{DOCUMENT}{short}", None) == short
    assert question(f"{DOCUMENT}{WHICH}\n\nWhy?", None) == f"{WHICH}\n\nWhy?"


@pytest.mark.parametrize("text", ["", "\n\n \n", "\x00", "?"])
def test_nothing_to_ask(text):
    assert question(text, None) == text.strip()


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('never') }}",
        "{{ messages[0].content }}",  # the other messages are missing
        "{% for m in messages %}{{ m.content }}{% endfor %}",  # nothing around a message
        "{{ 1 / 0 }}",
    ],
)
def test_templates_without_marks(tokenizer, template):
    tokenizer.chat_template = template
    assert turn_marks(tokenizer) is None


def test_no_template(tokenizer):
    tokenizer.chat_template = None
    assert turn_marks(tokenizer) is None
