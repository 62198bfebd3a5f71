"""Runs, rows and servers that the bench tests make up."""

from rapid_sgl.bench.records import Run, StepMeans, Trace
from rapid_sgl.http_client import ServerInfo


def trace(*events, sent=0.0, prompt=100, cached=99):
    return Trace(sent, list(events), prompt, cached)


def means(accept_length=4.0, draft_ms=40.0, verify_ms=80.0, step_ms=125.0, batch=1.0, rate=0.75):
    return StepMeans(batch, accept_length, rate, draft_ms, verify_ms, step_ms)


def run_of(ms_per_token, steps=None, ttft_ms=50.0, **more):
    return Run(ms_per_token, ttft_ms, 0.99, steps, **more)


TARGET = (
    run_of(100.0, means(1.0, 0.0, 95.0, 99.0, rate=None)),
    run_of(102.0, means(1.0, 0.0, 97.0, 101.0, rate=None)),
)
VIEW = (run_of(30.0, means()), run_of(34.0, means(step_ms=129.0)))


def server_info(**raw):
    facts = {
        "max_running_requests": 8,
        "max_total_num_tokens": 20000,
        "speculative_num_draft_tokens": 5,
        **raw,
    }
    return ServerInfo("m", "m", 8000, "RAPID", False, facts)
