"""The Prometheus series of a worker, and the dashboard that shows them."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from rapid_sgl.metrics import StepMetrics
from rapid_sgl.stats import Step

DASHBOARD = Path(__file__).parents[2] / "docs/grafana/rapid-sgl.json"


@pytest.fixture(scope="module")
def metrics():
    return StepMetrics({"model_name": "m", "tp_rank": 0})


def value(name, **labels):
    return REGISTRY.get_sample_value(name, {"model_name": "m", "tp_rank": "0", **labels})


def test_a_step_is_counted_by_source_decision_and_phase(metrics):
    step = Step(gap_s=0.0)
    step.seconds = {"encode": 0.5, "draft": 1.0, "step": 4.0}
    step.count([[1, 2, 3], [4, 5], []], [1, 2, 0], [0, 2, 0])
    metrics.step(step, "draft", {"size": 10, "free": 4, "evictable": 1})
    metrics.row(0.02)
    metrics.undrafted("lora")
    metrics.reselection()
    assert value("sglang:rapid_draft_tokens_total", source="model") == 3
    assert value("sglang:rapid_draft_tokens_total", source="copy") == 2
    assert value("sglang:rapid_accepted_tokens_total", source="model") == 1
    assert value("sglang:rapid_accepted_tokens_total", source="copy") == 2
    assert value("sglang:rapid_steps_total", decision="draft") == 1
    assert value("sglang:rapid_step_seconds_total", phase="verify") == 2.5
    assert value("sglang:rapid_draft_length_bucket", le="2.0") == 0
    assert value("sglang:rapid_draft_length_bucket", le="3.0") == 1
    assert value("sglang:rapid_draft_kv_tokens", state="used") == 5
    assert value("sglang:rapid_undrafted_requests_total", reason="lora") == 1
    assert value("sglang:rapid_row_build_seconds_count") == 1
    assert value("sglang:rapid_reselections_total") == 1


def test_the_dashboard_asks_only_for_series_that_exist(metrics):
    board = json.loads(DASHBOARD.read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"sglang:rapid_\w+", target["expr"])
    }
    have = {sample.name for metric in REGISTRY.collect() for sample in metric.samples}
    assert asked and asked <= have, asked - have
