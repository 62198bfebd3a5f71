"""Options of SGLang programs: checked where written, in force where executed, in every thread.

Programs run on SGLang's real interpreter; the backend answers from memory and keeps what it was sent.
"""

from __future__ import annotations

import inspect
import pkgutil
import threading
from functools import cache

import pytest
import sglang as sgl

from rapid_sgl.config import RapidOptionError
from rapid_sgl.lang import RapidBackend, rapid_options
from rapid_sgl.lang.options import SUBMIT_TARGET, check_options, current_options, merged
from rapid_sgl.lang.passages import Passages
from rapid_sgl.models import embedded_model_path

FACT = "The lighthouse keeper keeps seven goats."
TEXT = "\n\n".join([f"Entry {n}: it rained in town {n} all day long." for n in range(60)])
TEXT = f"{TEXT[:1200]}\n\n{FACT}\n\n{TEXT[1200:]}"


@cache
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded_model_path())


class Memory(RapidBackend):
    """Answers every request with "ok" and keeps its body. Copies share ``bodies``."""

    def __init__(self, **options):
        super().__init__(Passages(tokenizer), options)
        self.bodies = []
        self.threads = set()

    def _send(self, body):
        self.bodies.append(body)
        self.threads.add(threading.get_ident())
        return {"text": "ok", "meta_info": {"spec_accept_length": 2.5}}

    def _stream(self, body):
        self.bodies.append(body)
        for piece in ("o", "k"):
            yield piece, {"spec_accept_length": 2.5}

    def sent(self):
        """``custom_params`` by the last word of the prompt; None where there were none."""
        return {
            body["text"].split()[-1]: body["sampling_params"].get("custom_params")
            for body in self.bodies
            if body["sampling_params"]["max_new_tokens"]
        }


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rapid_spam": 1}, "unknown option 'rapid_spam'"),
        ({"temperature": 0}, "unknown option 'temperature'"),
        ({"rapid_spam": None}, "unknown option 'rapid_spam'"),
        ({"rapid_lambda": 1.5}, "rapid_lambda=1.5 is out of range"),
        ({"rapid_drafter": "magic"}, "not one of view, rag, auto, off"),
        ({"rapid_spans": [1, 2, 3]}, "come in pairs"),
        ({"rapid_spans": [(5, 9), (1, 3)]}, "sorted and disjoint"),
        ({"rapid_query": " "}, "rapid_query must be a text"),
        ({"rapid_draft_ids": "12"}, "rapid_draft_ids must be a list"),
        ({"rapid_budget": 10, "rapid_head": 8, "rapid_recent": 8}, "exceeds rapid_budget=10"),
    ],
)
def test_wrong_options_are_refused_where_they_are_written(options, text):
    with pytest.raises(RapidOptionError, match=text):
        rapid_options(**options)
    with pytest.raises(RapidOptionError, match=text):
        Memory(**options)
    with pytest.raises(RapidOptionError, match=text):
        Memory().with_options(**options)


def test_spans_may_be_pairs_and_single_windows_are_the_servers_to_judge():
    assert check_options({"rapid_spans": [(1, 3), (5, 9)]}) == {"rapid_spans": [1, 3, 5, 9]}
    assert check_options({"rapid_spans": [1, 3, 5, 9]}) == {"rapid_spans": [1, 3, 5, 9]}
    assert check_options({"rapid_spans": []}) == {"rapid_spans": []}
    assert check_options({"rapid_budget": 100}) == {"rapid_budget": 100}  # below the default head + recent


def test_inner_scopes_add_win_and_replace_the_other_way_to_say_it():
    with rapid_options(rapid_query="goats", rapid_head=8):
        with rapid_options(rapid_spans=[(1, 2)], rapid_head=None):
            assert current_options() == {"rapid_spans": [1, 2], "rapid_head": None}
        with rapid_options(rapid_recent=9):
            assert current_options() == {"rapid_query": "goats", "rapid_head": 8, "rapid_recent": 9}
        assert current_options() == {"rapid_query": "goats", "rapid_head": 8}
    assert current_options() == {}
    assert merged({"rapid_draft_ids": [1]}, {"rapid_draft_prompt": "a"}) == {"rapid_draft_prompt": "a"}


@sgl.function
def calls(s):
    s += "one " + sgl.gen("a")
    with rapid_options(rapid_draft_length=2):
        s += " two " + sgl.gen("b")
        with rapid_options(rapid_drafter="rag"):
            s += sgl.user(" three " + sgl.gen("c"))
    s += " four " + sgl.gen("d")


@pytest.mark.parametrize("way", ["run", "no thread", "stream"])
def test_options_of_calls(way):
    backend = Memory(rapid_budget=600)
    state = calls.run(backend=backend, use_thread=way != "no thread", stream=way == "stream")
    if way == "stream":
        assert "".join(state.text_iter()).count("ok") == 4
    assert state.text().count("ok") == 4 and state.error() is None
    assert backend.sent() == {
        "one": {"rapid_budget": 600},
        "two": {"rapid_budget": 600, "rapid_draft_length": 2},
        "three": {"rapid_budget": 600, "rapid_draft_length": 2, "rapid_drafter": "rag"},
        "four": {"rapid_budget": 600},
    }
    assert state.get_meta_info("c")["spec_accept_length"] == 2.5


def test_plain_programs_send_no_options():
    backend = Memory()
    assert calls.run(backend=backend)["d"] == "ok"
    assert backend.sent()["one"] is None and backend.sent()["four"] is None


@sgl.function
def branching(s):
    s += "root "
    with rapid_options(rapid_draft_length=3):
        forks = s.fork(2)
    for number, branch in enumerate(forks.states):
        with rapid_options(rapid_spans=[(10 * number, 10 * number + 5)]):
            branch += f"branch{number} " + sgl.gen("x")
        branch += f" after{number} " + sgl.gen("y")
        inner = branch.fork(1)
        inner += f" inner{number} " + sgl.gen("z")
        inner.join()
    forks.join()
    s += " joined " + sgl.gen("end")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("around", [{}, {"rapid_drafter": "rag"}])
def test_options_of_branches_and_of_a_run(stream, around):
    backend = Memory()
    with rapid_options(**around):
        state = branching.run(backend=backend, stream=stream)
    assert "".join(state.text_iter()).endswith("joined ok")
    assert state["end"] == "ok" and state["x"] == ["ok", "ok"]
    sent = backend.sent()
    for number in range(2):
        spans = {"rapid_spans": [10 * number, 10 * number + 5]}
        assert sent[f"branch{number}"] == {**around, "rapid_draft_length": 3, **spans}
        assert sent[f"after{number}"] == {**around, "rapid_draft_length": 3}
        assert (sent[f"inner{number}"] or {}).items() >= around.items()
    assert sent["joined"] == (around or None)


@sgl.function
def one(s, word):
    s += f"{word} " + sgl.gen("x")


def test_options_reach_every_thread_of_a_batch():
    backend = Memory()
    with rapid_options(rapid_drafter="auto"):
        states = one.run_batch([{"word": f"w{n}"} for n in range(8)], backend=backend, num_threads=4)
    assert [state["x"] for state in states] == ["ok"] * 8
    assert backend.sent() == {f"w{n}": {"rapid_drafter": "auto"} for n in range(8)}
    assert len(backend.threads) > 1
    one.run("later", backend=backend)["x"]
    assert backend.sent()["later"] is None


def test_a_failing_call_leaves_nothing_behind():
    class Failing(Memory):
        def _send(self, body):
            raise RuntimeError("refused")

    with rapid_options(rapid_head=1), pytest.warns(UserWarning, match="refused"):
        state = one.run("w", backend=Failing())
        assert str(state.error()) == "refused"
    assert current_options() == {}


def test_a_program_that_goes_on_behind_a_failed_call_ends_with_its_error():
    """SGLang's own interpreter would wait forever at the fork."""

    @sgl.function
    def going_on(s):
        s += "w " + sgl.gen("x")
        assert str(s.error()) == "refused"
        s.fork(2)

    class Failing(Memory):
        def _send(self, body):
            raise RuntimeError("refused")

    with pytest.warns(UserWarning, match="refused"), pytest.raises(RuntimeError, match="refused"):
        going_on.run(backend=Failing())


@sgl.function
def asking(s, query, **options):
    s += TEXT + " Question: how many goats? "
    with rapid_options(rapid_query=query, rapid_budget=300, rapid_head=16, rapid_recent=64, **options):
        s += "Answer: " + sgl.gen("x")


def test_a_query_becomes_spans_of_the_prompt_as_it_is_then():
    backend = Memory()
    state = asking.run("How many goats has the lighthouse keeper?", backend=backend)
    meta, sent = state.get_meta_info("x"), backend.sent()["Answer:"]
    assert "rapid_query" not in sent
    assert {key: sent[key] for key in ("rapid_budget", "rapid_head", "rapid_recent")} == {
        "rapid_budget": 300,
        "rapid_head": 16,
        "rapid_recent": 64,
    }
    assert meta["rapid_spans"] == sent["rapid_spans"]
    ids = tokenizer()(backend.bodies[-1]["text"])["input_ids"]
    flat = sent["rapid_spans"]
    assert any(FACT in tokenizer().decode(ids[a:b]) for a, b in zip(flat[::2], flat[1::2], strict=True))
    assert sum(b - a for a, b in zip(flat[::2], flat[1::2], strict=True)) <= 300 - 16 - 64


def test_a_query_costs_nothing_where_nothing_is_drafted():
    backend = Memory(rapid_drafter="off")
    asking.run("goats", backend=backend).sync()
    assert backend.sent()["Answer:"].keys().isdisjoint({"rapid_spans", "rapid_query"})


def test_special_tokens_count_as_the_server_counts_them():
    text = f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n"
    passages = Passages(tokenizer)
    ids = tokenizer()(text)["input_ids"]
    assert passages.tokens(text).ids == ids
    (span, *_) = passages.find(text, "lighthouse keeper goats", budget=40)
    assert FACT in tokenizer().decode(ids[span[0] : span[1]]) or FACT in passages.quote(text, span)


def test_regex_schema_and_samples_travel():
    @sgl.function
    def constrained(s):
        s += "r " + sgl.gen("a", regex="[0-9]+", temperature=0)
        s += " j " + sgl.gen("b", json_schema="{}", max_tokens=7)
        s += " i " + sgl.gen_int("c")

    backend = Memory()
    constrained.run(backend=backend).sync()
    first, second, third = (body["sampling_params"] for body in backend.bodies)
    assert first["regex"] == "[0-9]+" and first["temperature"] == 0
    assert second["json_schema"] == "{}" and second["max_new_tokens"] == 7
    assert third["regex"].startswith("[-+]?[0-9]+")


def test_the_hook_fits_the_installed_sglang():
    """``SUBMIT_TARGET`` is called with one expression and reads its list of parts through ``expr_list``."""
    from sglang.lang.interpreter import StreamExecutor

    hooked = pkgutil.resolve_name(SUBMIT_TARGET)
    assert list(inspect.signature(inspect.unwrap(hooked)).parameters) == ["self", "expr"]
    assert inspect.unwrap(hooked) is not hooked, "the hook is not in place"
    assert "for x in other.expr_list" in inspect.getsource(StreamExecutor._execute)
    assert "copy_context" in inspect.getsource(StreamExecutor.__init__)
