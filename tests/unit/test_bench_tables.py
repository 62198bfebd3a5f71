"""`rapid-sgl bench` without a server: prompts, limits, tables, command lines."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench_world import TARGET, VIEW, server_info

from rapid_sgl.bench import BenchError
from rapid_sgl.bench.environment import environment
from rapid_sgl.bench.limits import Sizes, check_fits
from rapid_sgl.bench.prompts import SpanChooser, bench_prompts
from rapid_sgl.bench.rows import make_row, predicted_speedup
from rapid_sgl.bench.runner import Asked, Side, custom_params
from rapid_sgl.bench.session import drafting_config
from rapid_sgl.bench.steps import summary
from rapid_sgl.bench.table import print_rows, print_steps
from rapid_sgl.config import RapidConfig, RapidOptionError
from rapid_sgl.models import embedded_model_path
from rapid_sgl.request import Limits, parse_options

os.environ.setdefault("HF_HUB_OFFLINE", "1")
RAPID_SGL = Path(sys.executable).with_name("rapid-sgl")
SMALL = RapidConfig(budget=128, head=16, recent=64)


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
