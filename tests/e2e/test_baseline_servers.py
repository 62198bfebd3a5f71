"""SGLang's own NGRAM and STANDALONE on the portable CPU platform: they serve, and change no greedy answer."""

from __future__ import annotations

import pytest
from conftest import body, chat_ids, in_parallel, reference_text, serve

from rapid_sgl.bench.servers import PLAIN_SGLANG
from rapid_sgl.models import embedded_model_path

# two more servers, one of which compiles SGLang's n-gram corpus first
pytestmark = pytest.mark.slow

PROMPTS = (
    chat_ids("", "Name three colours."),
    chat_ids(reference_text(300), "Repeat the text above."),
    chat_ids(reference_text(700), "Explain the with statement."),
)
NEW_TOKENS = 40
FLAGS = {
    "NGRAM": ["--speculative-num-draft-tokens=6"],
    "STANDALONE": [
        "--speculative-num-steps=4",
        "--speculative-num-draft-tokens=5",
        "--speculative-eagle-topk=1",
        f"--speculative-draft-model-path={embedded_model_path()}",
    ],
}


@pytest.fixture(scope="module", params=list(FLAGS))
def baseline(request, tmp_path_factory):
    """One after the other: pytest groups tests by a module's fixture parameter."""
    flags = [f"--speculative-algorithm={request.param}", *FLAGS[request.param]]
    common = [f"--model-path={embedded_model_path()}", "--dtype=float32", "--max-total-tokens=8000"]
    log = tmp_path_factory.mktemp(request.param)
    for server in serve(log, *flags, *common, command=PLAIN_SGLANG):
        yield request.param, server


def test_greedy_answers_are_the_targets(baseline, rapid_server):
    name, server = baseline
    wanted = in_parallel(
        1,
        lambda ids: rapid_server.client.generate(**body(ids, NEW_TOKENS, rapid_drafter="off")),
        list(PROMPTS),
    )
    alone = in_parallel(1, lambda ids: server.client.generate(**body(ids, NEW_TOKENS)), list(PROMPTS))
    together = in_parallel(3, lambda ids: server.client.generate(**body(ids, NEW_TOKENS)), list(PROMPTS))
    for answers in (alone, together):
        assert [one["output_ids"] for one in answers] == [one["output_ids"] for one in wanted]
    lengths = [one["meta_info"]["spec_accept_length"] for one in alone]
    if name == "STANDALONE":  # the model drafts for itself
        assert min(lengths) > 3
    else:  # an answer that repeats itself is found again among the tokens of the ones before
        assert max(one["meta_info"]["spec_accept_length"] for one in [*alone, *together]) > 1.2


def test_sampling_works(baseline):
    """Also with filters, for which SGLang has no CPU kernels."""
    _, server = baseline
    ids = PROMPTS[0]
    for options in ({"temperature": 1}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20}):
        answer = server.client.generate(**body(ids, 16, ignore_eos=True, **options))
        assert answer["meta_info"]["completion_tokens"] == 16
    near_greedy = server.client.generate(**body(ids, 16, temperature=1, top_k=1))
    assert near_greedy["output_ids"] == server.client.generate(**body(ids, 16))["output_ids"]
