"""`rapid-sgl bench` without a server: windows, aggregation, prediction, prompts, tables, command lines."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rapid_sgl.bench import BenchError
from rapid_sgl.bench.environment import environment
from rapid_sgl.bench.prompts import bench_prompts
from rapid_sgl.bench.records import Run, StepMeans, Trace, make_row, make_run, predicted_speedup, step_means
from rapid_sgl.bench.records import window as measured
from rapid_sgl.bench.runner import Side, Sizes, check_fits, custom_params
from rapid_sgl.bench.session import drafting_config
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


def run_of(ms_per_token, steps=None, ttft_ms=50.0):
    return Run(ms_per_token, ttft_ms, 0.99, steps)


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
        self._steps(stats, [[1, 2, 3, 4], [5, 6, 7, 8]], [4, 4])
        result = step_means(before, stats.snapshot())
        assert result.batch == 2 and result.accept_rate == 12 / 16
        assert result.accept_length == (4 + 12) / 4
        assert result.draft_ms >= 0 and result.draft_ms + result.verify_ms <= result.step_ms

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
    def _steps(stats, chains, accepted):
        with stats.step() as step:
            for phase in ("encode", "draft", "verify"):
                with step.timed(phase):
                    pass
            step.count(chains, torch.tensor(accepted))


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
        prompts = bench_prompts(builder, context, 8, SMALL)
        assert [len(prompt.ids) for prompt in prompts] == [context] * 8
        assert len({tuple(prompt.ids) for prompt in prompts}) == 8
        again = bench_prompts(builder, context, 2, SMALL)
        assert [prompt.ids for prompt in again] == [prompt.ids for prompt in prompts[:2]]

    def test_the_spans_are_what_a_server_accepts(self, builder):
        for prompt in bench_prompts(builder, 1000, 3, SMALL):
            assert prompt.spans
            wire = custom_params("view", SMALL, prompt)
            options = parse_options(wire, RapidConfig(), Limits(1000, 4))
            assert options.config == SMALL and list(options.spans) == prompt.spans
            off = parse_options(custom_params("target", SMALL, prompt), RapidConfig(), Limits(1000, 4))
            assert off.config.drafter == "off" and off.spans == ()

    def test_too_short_and_too_long(self, builder):
        with pytest.raises(BenchError, match="no room"):
            bench_prompts(builder, 10, 1, SMALL)
        with pytest.raises(BenchError, match="longer than the built-in text"):
            bench_prompts(builder, 10**6, 1, SMALL)


def server_info(**raw):
    facts = {
        "max_running_requests": 8,
        "max_total_num_tokens": 20000,
        "speculative_num_draft_tokens": 5,
        **raw,
    }
    return ServerInfo("m", "m", 8000, "RAPID", False, facts)


class TestLimits:
    SIZES = Sizes(64, 0.0, RapidConfig())

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
