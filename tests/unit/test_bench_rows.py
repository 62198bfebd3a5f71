"""`rapid-sgl bench` without a server: windows, aggregation, rows, prediction, memory."""

import json

import pytest
from bench_world import TARGET, VIEW, means, run_of, server_info, trace

from rapid_sgl.bench import BenchError
from rapid_sgl.bench.limits import Sizes, kv_mb, kv_token_bytes
from rapid_sgl.bench.records import (
    Acceptance,
    Trace,
    accept_by_position,
    make_run,
    step_means,
)
from rapid_sgl.bench.records import window as measured
from rapid_sgl.bench.rows import make_row, percentile, predicted_speedup
from rapid_sgl.bench.session import shared_sides
from rapid_sgl.config import RapidConfig
from rapid_sgl.models import embedded_model_path
from rapid_sgl.stats import StepStats


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
