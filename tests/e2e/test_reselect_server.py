"""Re-selection on the real server: spans follow what a long answer is about, and the answer stays what it was."""

from __future__ import annotations

import re
from bisect import bisect_right

import pytest
from conftest import body, chat_ids, generate, in_parallel, rapid_stats, reference_text, tokenizer
from test_identity import assert_same_tokens

SECTIONS = (
    "The harbour of Vellamo freezes in November. Icebreakers leave at dawn, and pilots climb rope ladders onto "
    "tankers while gulls circle over the breakwater. Fishermen mend herring nets beside iron stoves, sell smoked "
    "eel from wooden sheds, and paint their hulls with red lead before the spring tides return.",
    "Sister Odile kept bees behind the abbey orchard. Her hives stood on slate, facing the morning sun, and each "
    "queen had a name from the psalter. Clover honey went to pilgrims, heather honey to the infirmary, and wax was "
    "melted into tapers that burned through the long vigils of Advent.",
    "Engineers rebuilt the Karsund viaduct with granite from two quarries. Cranes lowered arch stones weighing nine "
    "tonnes, surveyors measured the settling piers every Friday, and a ballast locomotive crossed first, at walking "
    "pace, followed by carriages full of proud masons and their children.",
)
ORDER = (0, 2, 1)
QUESTION = "Repeat the passages about the harbour, the viaduct and the bees."
SMALL = {
    "rapid_budget": 320,
    "rapid_head": 16,
    "rapid_recent": 96,
    "rapid_draft_length": 4,
    "rapid_copy": "off",
}


def _document():
    """About 3000 tokens of Python's reference with the sections far from each other."""
    text = reference_text(2700)
    pieces = [text[len(text) * i // 4 : len(text) * (i + 1) // 4] for i in range(4)]
    return "\n\n".join(part for pair in zip(pieces, [*SECTIONS, ""], strict=True) for part in pair).strip()


@pytest.fixture(scope="module")
def prompt():
    return chat_ids(_document(), QUESTION)


@pytest.fixture(scope="module")
def places(prompt):
    """Token ranges of the sections in the prompt."""
    starts, text = [], ""
    for token in prompt:
        starts.append(len(text))
        text += tokenizer().decode([token])
    bounds = [(text.index(section), text.index(section) + len(section)) for section in SECTIONS]
    return [(bisect_right(starts, first) - 1, bisect_right(starts, last - 1)) for first, last in bounds]


def test_spans_follow_the_answer(rapid_server, prompt, places):
    """A grammar makes the answer go through the sections; the spans are where it is, not where it was."""
    answer_text = " ".join(SECTIONS[index] for index in ORDER)
    options = {"max_new_tokens": 400, "regex": re.escape(answer_text).replace("\\ ", " ")}
    plain = generate(rapid_server, prompt, **options, rapid_drafter="off")
    assert plain["text"] == answer_text
    before = rapid_stats(rapid_server)["reselections"]
    answer = generate(rapid_server, prompt, **options, **SMALL, rapid_reselect=16, rapid_trace="on")
    assert answer["output_ids"] == plain["output_ids"]
    info = answer["meta_info"]
    assert info["rapid_drafter"] == "view" and info["rapid_reselections"] >= len(SECTIONS)
    assert rapid_stats(rapid_server)["reselections"] - before == info["rapid_reselections"]
    history = info["rapid_reselected"]
    assert len(history) == info["rapid_reselections"]
    in_force, seen = [], set()
    for count in range(16, len(answer["output_ids"]), 16):
        in_force = next((bounds for due, *bounds in history if due == count), in_force)
        spans = list(zip(in_force[::2], in_force[1::2], strict=True))
        assert sum(end - start for start, end in spans) <= 320 - 16 - 96
        said = tokenizer().decode(answer["output_ids"][:count])
        # behind the last section's start there are at least 24 tokens of it, or it may still be the one before
        late = tokenizer().decode(answer["output_ids"][: max(0, count - 24)])
        current, settled = (
            sum(" ".join(SECTIONS[i] for i in ORDER[:n]) in part for n in (1, 2)) for part in (said, late)
        )
        if current == settled and len(late) > 0:
            seen.add(current)
            start, end = places[ORDER[current]]
            held = sum(max(0, min(end, b) - max(start, a)) for a, b in spans)
            assert held >= 0.8 * (end - start), (count, current, (start, end), spans)
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("every", [1, 16])
def test_greedy_answers_are_those_of_plain_decoding(rapid_server, prompt, every):
    options = {"max_new_tokens": 96, "ignore_eos": True}
    plain = generate(rapid_server, prompt, **options, rapid_drafter="off")
    answer = generate(rapid_server, prompt, **options, **SMALL, rapid_reselect=every)
    assert_same_tokens(rapid_server, prompt, answer, plain, ignore_eos=True)
    info = answer["meta_info"]
    assert 0 < info["rapid_reselections"] <= 96 / every
    assert info["spec_accept_length"] > 1.3, "a row that lists wrong slots drafts nothing that is kept"
    assert "rapid_reselected" not in info  # only where a trace was asked for


def test_rows_that_see_nearly_everything_are_always_right(rapid_server):
    """Spans of all but one token of the prompt, chosen again and again: a wrong slot in a row shows here."""
    ids = chat_ids(reference_text(1500), "Summarise the text above.")
    windows = {"rapid_budget": len(ids) - 1, "rapid_head": 16, "rapid_recent": 96}
    ask = {"max_new_tokens": 80, "ignore_eos": True, **SMALL, **windows, "rapid_reselect": 4}
    info = generate(rapid_server, ids, **ask)["meta_info"]
    assert info["rapid_reselections"] > 0
    assert info["spec_accept_length"] > 4.5, info["spec_accept_length"]


def test_seeded_answers_repeat_whatever_else_is_served(rapid_server, prompt):
    """Re-selection happens at the same tokens, whether the index had time to be built or not."""
    options = {"temperature": 1.0, "sampling_seed": 11, "max_new_tokens": 64, "ignore_eos": True}
    seeded = body(prompt, **options, **SMALL, rapid_reselect=8)
    alone = rapid_server.client.generate(**seeded)
    other = body(chat_ids(reference_text(1200), "What is a loop?"), 48, temperature=1.0)
    answers = in_parallel(
        4, lambda item: rapid_server.client.generate(**item), [other, seeded, other, seeded]
    )
    assert alone["meta_info"]["rapid_reselections"] > 0
    for answer in (answers[1], answers[3]):
        assert answer["output_ids"] == alone["output_ids"]
        assert answer["meta_info"]["rapid_reselections"] == alone["meta_info"]["rapid_reselections"]


def test_no_other_drafter_is_followed(rapid_server, prompt):
    for options in ({"rapid_drafter": "rag"}, {"rapid_drafter": "off"}, {"rapid_recent": 304}):
        answer = generate(rapid_server, prompt, 24, **{**SMALL, **options}, rapid_reselect=4)
        assert "rapid_reselections" not in answer["meta_info"]
