"""`rapid-sgl bench` without a server: windows, aggregation, prediction, prompts, tables, command lines."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rapid_sgl.bench import BenchError
from rapid_sgl.bench.environment import environment
from rapid_sgl.bench.limits import Sizes, check_fits, kv_mb, kv_token_bytes
from rapid_sgl.bench.prompts import SpanChooser, bench_prompts
from rapid_sgl.bench.records import (
    Acceptance,
    Run,
    StepMeans,
    Trace,
    accept_by_position,
    make_run,
    step_means,
)
from rapid_sgl.bench.records import window as measured
from rapid_sgl.bench.rows import make_row, percentile, predicted_speedup
from rapid_sgl.bench.runner import Asked, Side, custom_params
from rapid_sgl.bench.session import drafting_config, shared_sides
from rapid_sgl.bench.steps import summary
from rapid_sgl.bench.table import print_rows, print_steps
from rapid_sgl.config import RapidConfig, RapidOptionError
from rapid_sgl.http_client import ServerInfo
from rapid_sgl.models import embedded_model_path
from rapid_sgl.request import Limits, parse_options
from rapid_sgl.stats import StepStats

os.environ.setdefault("HF_HUB_OFFLINE", "1")
RAPID_SGL = Path(sys.executable).with_name("rapid-sgl")
SMALL = RapidConfig(budget=128, head=16, recent=64)


def trace(*events, sent=0.0, prompt=100, cached=99):
    return Trace(sent, list(events), prompt, cached)


def means(accept_length=4.0, draft_ms=40.0, verify_ms=80.0, step_ms=125.0, batch=1.0, rate=0.75):
    return StepMeans(batch, accept_length, rate, draft_ms, verify_ms, step_ms)


def run_of(ms_per_token, steps=None, ttft_ms=50.0, **more):
    return Run(ms_per_token, ttft_ms, 0.99, steps, **more)


class TestWindow:
    def test_one_request_counts_from_first_event_to_the_one_that_completes_it(self):
        seconds, tokens = measured([trace((1.0, 1), (1.5, 5), (2.0, 9), (9.0, 13))], 8)
        assert (seconds, tokens) == (1.0, 8)

    def test_prefill_of_a_late_request_is_outside(self):
        early = trace((1.0, 1), (5.1, 2), (5.2, 3), (5.3, 4))
        late = trace((5.0, 1), (5.1, 2), (5.2, 3), (5.3, 4))
        seconds, tokens = measured([early, late], 4)
        assert seconds == pytest.approx(0.2 + 0.3) and tokens == 2 + 3

    def test_it_closes_with_the_first_request_that_is_complete(self):
        fast = trace((0.0, 1), (1.0, 5), (2.0, 10), (3.0, 15))
        slow = trace((0.0, 1), (0.9, 3), (1.9, 5), (9.0, 10))
        seconds, tokens = measured([fast, slow], 10)
        assert seconds == pytest.approx(2.0 + 1.9) and tokens == 9 + 4

    def test_equal_steps_give_the_step_time_over_the_mean_accept_length(self):
        lengths = (3, 5)  # two requests in the same steps of 0.1 s
        traces = [trace(*((0.1 * step, 1 + step * length) for step in range(30))) for length in lengths]
        seconds, tokens = measured(traces, 64)
        assert seconds / tokens == pytest.approx(0.1 / 4)

    def test_a_short_run_counts_whole(self):
        assert measured([trace((1.0, 1), (2.0, 5))], 1) == (1.0, 4)

    def test_an_answer_in_one_piece_is_refused(self):
        with pytest.raises(BenchError, match="--new-tokens"):
            measured([trace((1.0, 8))], 8)

    def test_run_averages_time_to_first_token_and_cache_hits(self):
        run = make_run(
            [
                trace((1.0, 1), (2.0, 9), sent=0.5, cached=100),
                trace((1.0, 1), (2.0, 9), sent=0.7, cached=50),
            ],
            8,
            None,
        )
        assert run.ms_per_token == pytest.approx(125.0)
        assert run.ttft_ms == pytest.approx(400.0) and run.cached_share == pytest.approx(0.75)


class TestStepMeans:
    def test_totals_of_the_real_statistics(self):
        """Differences of two snapshots of the worker's own StepStats, not of the totals since start."""
        stats = StepStats()
        self._steps(stats, [[1, 2, 3, 4], [1, 2]], [4, 0])
        before = stats.snapshot()
        self._steps(stats, [[1, 2, 3, 4], [5, 6, 7, 8]], [3, 1])
        self._steps(stats, [[1, 2, 3, 4], [5, 6, 7, 8]], [4, 4], copied=[1, 0])
        result = step_means(before, stats.snapshot())
        assert result.batch == 2 and result.accept_rate == 12 / 16
        assert result.accept_length == (4 + 12) / 4
        assert result.draft_ms >= 0 and result.draft_ms + result.verify_ms <= result.step_ms
        assert result.copied_share == 4 / 16

    def test_steps_without_drafts_count_beside_others(self):
        stats = StepStats()
        before = stats.snapshot()
        self._steps(stats, [[1, 2, 3, 4]], [4])
        self._steps(stats, [[]], [0])
        result = step_means(before, stats.snapshot())
        assert result.accept_length == 3 and result.accept_rate == 1 and result.batch == 1

    def test_steps_without_drafts(self):
        stats = StepStats()
        before = stats.snapshot()
        self._steps(stats, [[]], [0])
        result = step_means(before, stats.snapshot())
        assert (result.accept_length, result.accept_rate, result.draft_ms) == (1.0, None, 0.0)

    def test_no_steps(self):
        stats = StepStats()
        assert step_means(stats.snapshot(), stats.snapshot()) is None

    @staticmethod
    def _steps(stats, chains, accepted, copied=None):
        with stats.step() as step:
            for phase in ("encode", "draft", "verify"):
                with step.timed(phase):
                    pass
            step.count(chains, accepted, copied or [0] * len(chains))


TARGET = (
    run_of(100.0, means(1.0, 0.0, 95.0, 99.0, rate=None)),
    run_of(102.0, means(1.0, 0.0, 97.0, 101.0, rate=None)),
)
VIEW = (run_of(30.0, means()), run_of(34.0, means(step_ms=129.0)))


class TestRow:
    def test_medians_and_comparison(self):
        row = make_row("view", "same", 3500, 8, VIEW, TARGET)
        assert list(row)[:10] == [
            "method", "context", "batch", "ms_per_token", "accept_length", "accept_rate",
            "draft_ms", "verify_ms", "decode_ms", "speedup_vs_target",
        ]  # fmt: skip
        assert (row["method"], row["context"], row["batch"], row["repeats"]) == ("view", 3500, 8, 2)
        assert row["ms_per_token"] == 32.0 and row["ms_per_token_range"] == [30.0, 34.0]
        assert row["decode_ms"] == 100.0
        assert row["speedup_vs_target"] == pytest.approx(101 / 32, abs=1e-4)
        assert row["speedup_range"] == pytest.approx([3.0, 100 / 30], abs=1e-4)
        assert row["step_ms"] == 127.0
        assert row["outside_share"] == pytest.approx(7 / 127, abs=1e-4)
        assert row["predicted_speedup"] == pytest.approx(4 * 100 / 120, abs=1e-4)
        assert row["measured_over_predicted"] == pytest.approx((101 / 32) / (400 / 120), abs=1e-4)

    def test_the_target_itself_has_no_prediction(self):
        row = make_row("target", "same", 3500, 8, TARGET, TARGET)
        assert row["speedup_vs_target"] == 1.0 and row["predicted_speedup"] is None
        assert row["accept_length"] == 1.0 and row["accept_rate"] is None and row["draft_ms"] == 0.0

    def test_without_target_nothing_is_compared(self):
        row = make_row("view", "same", 3500, 8, VIEW, [])
        compared = (
            "decode_ms",
            "speedup_vs_target",
            "predicted_speedup",
            "measured_over_predicted",
            "speedup_range",
        )
        assert all(row[name] is None for name in compared)
        assert row["ms_per_token"] == 32.0

    def test_a_server_without_statistics_is_compared_by_time_alone(self):
        row = make_row("torch_native", "same", 3500, 1, [run_of(202.0)], TARGET)
        assert row["speedup_vs_target"] == 0.5
        assert (
            row["accept_length"] is row["step_ms"] is row["outside_share"] is row["predicted_speedup"] is None
        )

    def test_rows_are_strict_json(self):
        rows = [
            make_row("view", "same", 1, 1, VIEW, TARGET),
            make_row("torch_native", "same", 1, 1, [run_of(1.0)], []),
        ]
        assert json.loads(json.dumps(rows, allow_nan=False)) == rows


class TestNewFields:
    def row(self, **facts):
        runs = [
            run_of(20.0, means(), gaps_ms=(10.0, 30.0), acceptance=Acceptance(2.0, 0.5, (1, 2, 1))),
            run_of(20.0, means(), gaps_ms=(50.0,), acceptance=Acceptance(2.0, 0.5, (0, 1, 1, 2))),
        ]
        return make_row("view", "same", 3500, 8, runs, TARGET, **facts)

    def test_throughput_and_inter_token_times(self):
        row = self.row()
        assert row["tokens_per_s"] == 400.0
        assert (row["inter_token_p50_ms"], row["inter_token_p99_ms"]) == (30.0, 50.0)

    def test_end_to_end_has_retrieval_and_prefill(self):
        row = self.row(cold_ttft_ms=1000.0, retrieval_ms=5.0, new_tokens=11)
        assert row["end_to_end_ms"] == 5 + 1000 + 10 * 20
        assert self.row(cold_ttft_ms=None, new_tokens=11)["end_to_end_ms"] is None

    def test_acceptance_by_position_pools_the_repeats(self):
        # 8 steps together: 1 kept none, 3 one, 2 two, 2 three
        assert self.row()["accept_by_position"] == pytest.approx([7 / 8, 4 / 7, 2 / 4], abs=1e-4)
        assert accept_by_position([3]) == [] and accept_by_position([]) == []

    def test_without_rapid_acceptance_comes_from_the_answers(self):
        runs = [run_of(20.0, acceptance=Acceptance(3.0, 0.5, (1, 1)))]
        row = make_row("ngram", "same", 3500, 1, runs, TARGET)
        assert row["accept_length"] == 3.0 and row["accept_rate"] == 0.5 and row["draft_ms"] is None

    def test_plain_rag_has_no_prediction(self):
        row = make_row("rag-only", "same", 3500, 1, [run_of(9.0, means(1.0, 0.0, rate=None))], TARGET)
        assert row["speedup_vs_target"] > 1 and row["predicted_speedup"] is None

    def test_traces_give_gaps_and_acceptance(self):
        one = Trace(
            0.0, [(1.0, 1), (1.3, 4), (1.4, 5)], 9, 9, passes=2, proposed=8, accepted=3, histogram=(0, 1, 1)
        )
        run = make_run([one], 5, None)
        assert run.gaps_ms == pytest.approx((100.0,) * 4)
        assert run.acceptance == Acceptance(2.5, 3 / 8, (0, 1, 1))
        assert make_run([trace((1.0, 1), (2.0, 9))], 8, None).acceptance is None

    def test_percentiles_are_by_nearest_rank(self):
        values = [float(value) for value in range(1, 101)]
        assert (percentile(values, 0.5), percentile(values, 0.99), percentile([], 0.5)) == (50.0, 99.0, None)


class TestMemory:
    SIZES = Sizes(64, RapidConfig(draft_length=4))

    def test_bytes_of_a_token_of_the_embedded_model(self):
        """30 layers of 3 KV heads of 64, keys and values, float32."""
        assert kv_token_bytes(str(embedded_model_path()), "float32") == 30 * 3 * 64 * 2 * 4

    def test_what_drafts_hold_besides_the_target(self):
        target, view, rag, standalone, short = (
            kv_mb(method, 7000, 2, self.SIZES, 1000, 500)
            for method in ("target", "view", "rag", "standalone", "rag-only")
        )
        assert view == pytest.approx(2 * (7000 + 64 + 3 * 5 + 10) / 1e3)
        assert rag - view == pytest.approx(2 * (1024 + 64 + 15) * 500 / 1e6)
        assert standalone == pytest.approx(1.5 * view) and short < target / 5 and target < view
        assert kv_mb("view", 7000, 2, self.SIZES, None, None) is None


def test_every_form_of_a_method_once():
    """A method is measured once per value of what it knows of, and not again for what it does not."""
    sizes = Sizes(64, RapidConfig(draft_length=4))

    def forms(method, variants):
        sides = shared_sides(
            method, "http://127.0.0.1:1", server_info(), sizes,
            weights=["same", "int8"], retrievals=["oracle", "random"], variants=variants,
        )  # fmt: skip
        return [side.name for side in sides]

    both = [{"copy": copy, "budget": budget} for copy in ("on", "off") for budget in (700, 900)]
    assert forms("target", both) == ["target"]
    assert len(forms("view", both)) == 2 * 2 * 4 and "view int8 random copy=off budget=900" in forms(
        "view", both
    )
    assert forms("recent", [{}]) == ["recent", "recent int8"]
    assert forms("copy", both) == ["copy"]
    assert forms("rag-only", both) == [
        f"rag-only {kind} budget={budget}" for budget in (700, 900) for kind in ("oracle", "random")
    ]


def test_prediction_is_the_cost_model():
    """Equals step(gamma) and tokens(gamma, a) of DESIGN section 7 for its own definitions."""
    gamma, accept, draft, verify, decode = 4, 0.8, 10.0, 60.0, 50.0
    tokens = (1 - accept ** (gamma + 1)) / (1 - accept)
    predicted = predicted_speedup(tokens, decode, gamma * draft, verify)
    assert predicted == pytest.approx((tokens / (gamma * draft + verify)) / (1 / decode))


class TestPrompts:
    @pytest.fixture(scope="class")
    def builder(self):
        from transformers import AutoTokenizer

        from rapid_sgl.retrieval.prompt import PromptBuilder

        return PromptBuilder(AutoTokenizer.from_pretrained(embedded_model_path()))

    @pytest.mark.parametrize("context", [80, 200, 1000])
    def test_exact_length_and_different_members(self, builder, context):
        prompts = bench_prompts(builder, context, 8)
        assert [len(prompt.ids) for prompt in prompts] == [context] * 8
        assert len({tuple(prompt.ids) for prompt in prompts}) == 8
        again = bench_prompts(builder, context, 2)
        assert [prompt.ids for prompt in again] == [prompt.ids for prompt in prompts[:2]]

    def test_the_spans_are_what_a_server_accepts(self, builder):
        for prompt in bench_prompts(builder, 1000, 3):
            asked = Asked(prompt.ids, SpanChooser().find(prompt, "bm25", SMALL).spans)
            assert asked.spans
            options = parse_options(custom_params("view", SMALL, asked), RapidConfig(), Limits(1000, 10))
            assert options.config == SMALL and list(options.spans) == asked.spans
            off = parse_options(custom_params("target", SMALL, asked), RapidConfig(), Limits(1000, 10))
            assert off.config.drafter == "off" and off.spans == ()

    def test_copies_alone_leave_nothing_to_draft(self):
        """A prompt within the budget gets no draft row, so that copies are all there is."""
        wire = custom_params("copy", SMALL, Asked([0] * 5000))
        options = parse_options(wire, RapidConfig(), Limits(5000, 10))
        assert options.config.budget == 5000 and options.config.copy == "on" and options.spans == ()

    def test_too_short_and_too_long(self, builder):
        with pytest.raises(BenchError, match="no room"):
            bench_prompts(builder, 10, 1)
        with pytest.raises(BenchError, match="longer than the built-in text"):
            bench_prompts(builder, 10**6, 1)


def server_info(**raw):
    facts = {
        "max_running_requests": 8,
        "max_total_num_tokens": 20000,
        "speculative_num_draft_tokens": 5,
        **raw,
    }
    return ServerInfo("m", "m", 8000, "RAPID", False, facts)


class TestLimits:
    SIZES = Sizes(64, RapidConfig(draft_length=4))

    def check(self, context, batch, **raw):
        check_fits(
            Side("view", "http://127.0.0.1:1", server_info(**raw), self.SIZES), context, batch, self.SIZES
        )

    def test_a_cell_that_fits(self):
        self.check(7000, 2)

    @pytest.mark.parametrize(
        ("context", "batch", "text"),
        [(7950, 1, "context 7950"), (100, 9, "--max-running-requests"), (7000, 3, "--max-total-tokens")],
    )
    def test_cells_that_do_not(self, context, batch, text):
        with pytest.raises(BenchError, match=text):
            self.check(context, batch)

    def test_views_need_a_rapid_server(self):
        with pytest.raises(BenchError, match="does not run RAPID"):
            drafting_config(server_info(internal_states=[{}]), {})

    def test_options_come_from_the_server_and_the_command_line(self):
        states = [{"rapid": {"config": vars(SMALL)}}]
        config = drafting_config(server_info(internal_states=states), {"draft_length": 2})
        assert config == RapidConfig(budget=128, head=16, recent=64, draft_length=2)
        with pytest.raises(BenchError, match="--draft-length 9"):
            drafting_config(server_info(internal_states=states), {"draft_length": 9})
        with pytest.raises(RapidOptionError):
            drafting_config(server_info(internal_states=states), {"budget": 20})


def test_tables_show_the_numbers(capsys):
    print_rows(
        [
            make_row("target", "same", 3500, 1, TARGET, TARGET),
            make_row("view", "same", 3500, 1, VIEW, TARGET),
        ]
    )
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if "3,500" in line]
    assert len(lines) == 2 and "target" in lines[0] and "view" in lines[1]
    assert all(
        number in lines[1] for number in ("32.0", "30.0-34.0", "4.00", "0.75", "5.5%", "3.16x", "3.33x")
    )
    assert "…" not in text  # nothing was cut off


def step_times():
    times = {("decode", 128): [50.0, 52.0, 51.0], ("decode", 7000): [100.0, 90.0, 110.0]}
    times |= {("extend1", 7000): [120.0] * 3, ("extend1", 128): [55.0] * 3}
    times |= {("verify5", 7000): [160.0] * 3, ("verify5", 128): [70.0] * 3}
    return times | {("linears", 1): [40.0, 40.0, 41.0], ("linears", 5): [70.0] * 3}


def test_step_summary(capsys):
    report = summary(step_times())
    assert report["decode_ms"] == {"128": 51.0, "7000": 100.0}
    assert report["extend1_ms"]["7000"] == 120.0 and report["verify5_ms"]["7000"] == 160.0
    assert report["linears_ms"] == {"1": 40.0, "5": 70.0}
    assert report["ratios"] == {
        "extend1_over_decode": 1.2,
        "verify5_over_decode": 1.6,
        "decode_over_linears": 1.275,
    }
    eager = {("decode_eager", 128): [102.0] * 3, ("decode_eager", 7000): [150.0] * 3}
    assert summary(step_times() | eager)["ratios"]["eager_over_decode"] == 2.0
    assert report["range_ms"]["decode"]["7000"] == [90.0, 110.0]
    print_steps(report)
    text = capsys.readouterr().out
    assert "100.0" in text and "90.0-110.0" in text and "verify5_over_decode = 1.60" in text


def test_environment_is_complete_and_without_paths(tmp_path):
    facts = environment(str(tmp_path))
    assert facts["model"] == tmp_path.name and facts["sglang"] and facts["torch"] and facts["cpu"]
    assert facts["cores"] >= 1
    assert environment("org/model")["model"] == "org/model"
    assert str(Path.cwd()) not in json.dumps(facts)


def test_help_explains_every_key_of_a_row():
    text = subprocess.run([RAPID_SGL, "bench", "--help"], capture_output=True, text=True, timeout=60).stdout
    row = make_row("view", "same", 1, 1, VIEW, TARGET)
    exempt = {"method", "context", "batch", "repeats", "ms_per_token_range"}
    assert [name for name in row if name not in text and name not in exempt] == []


def test_nothing_is_infinite_when_a_step_costs_nothing_but_its_verify():
    assert math.isfinite(predicted_speedup(1.0, 50.0, 0.0, 50.0))
