"""Three tensor-parallel ranks. Were one of them to decide otherwise than the others, they would run different passes
and the server would hang or talk nonsense."""

import os

import pytest
from conftest import chat_ids, generate, in_parallel, rapid_stats, reference_text, serve, undrafted
from test_identity import assert_same_tokens

TEXT = reference_text(700)
PROMPTS = [
    chat_ids(TEXT, question)
    for question in (
        "What is it about?",
        "Quote the first sentence.",
        "List three terms.",
        "Which names occur?",
    )
]
TINY = {"rapid_budget": 300, "rapid_head": 16, "rapid_recent": 128}
TOKENS, SAMPLED = 32, 16
# options of requests that are decoded in one batch
MIXED = [
    {},
    {"rapid_draft_length": 3},
    {"rapid_drafter": "rag", "rapid_draft_length": 2},
    {"rapid_reselect": 8},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The embedded model has 9 heads and 3 KV heads; SGLang wants to be told which cores each rank may use."""
    cores = os.cpu_count() or 1
    binding = "|".join(str(rank % cores) for rank in range(3))
    yield from serve(
        tmp_path_factory.mktemp("ranks"),
        "--tp-size=3",
        "--max-total-tokens=12000",
        env={"SGLANG_CPU_OMP_THREADS_BIND": binding},
    )


def answers(server, options, tokens=TOKENS, **sampling):
    def ask(pair):
        ids, own = pair
        return generate(server, ids, tokens, ignore_eos=True, **TINY, **own, **sampling)

    return in_parallel(4, ask, list(zip(PROMPTS, options, strict=True)))


def test_greedy_answers_are_the_targets(server):
    expected = undrafted(server, PROMPTS, TOKENS, ignore_eos=True)
    for options in (MIXED, [{}] * 4):  # lengths chosen by the ranks, beside prescribed ones and alone
        for ids, answer, alone in zip(PROMPTS, answers(server, options), expected, strict=True):
            assert_same_tokens(server, ids, answer, alone)
    decisions = rapid_stats(server)["pace"]["decisions"]
    assert decisions["fixed"] > 5 and decisions["plain"] > 5
    assert sum(decisions.get(kind, 0) for kind in ("copy", "draft", "probe")) > 0, decisions


def test_sampled_answers_end_and_seeds_repeat(server):
    free = answers(server, [{}] * 4, SAMPLED, temperature=1.0)
    assert [len(answer["output_ids"]) for answer in free] == [SAMPLED] * 4
    first, second = (answers(server, [{}] * 4, SAMPLED, temperature=1.0, sampling_seed=5) for _ in range(2))
    assert [answer["output_ids"] for answer in first] == [answer["output_ids"] for answer in second]
    assert all(answer["meta_info"]["spec_accept_length"] > 1.2 for answer in first)
