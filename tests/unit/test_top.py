"""What ``rapid-sgl top`` makes of two reports of a server."""

from rich.console import Console

from rapid_sgl.cli import top

KEYS = (
    "steps",
    "requests",
    "proposed",
    "accepted",
    "copied",
    "copies_accepted",
    "encode_s",
    "draft_s",
    "verify_s",
    "step_s",
)


def report(drafted, plain, decisions, lengths, undrafted):
    return {
        "drafted": dict(zip(KEYS, drafted, strict=True)),
        "plain": dict(zip(KEYS, plain, strict=True)),
        "pace": {"decisions": decisions},
        "lengths": lengths,
        "undrafted": undrafted,
        "running": 2,
        "draft_kv": {"size": 100, "free": 60, "evictable": 30},
    }


BEFORE = report([1, 1, 4, 2, 0, 0, 0, 0.1, 0.1, 0.2], [0] * 10, {"draft": 1}, {"4": 1}, {})
AFTER = report(
    [6, 11, 40, 26, 10, 8, 0, 0.6, 0.6, 1.2],
    [2, 4, 0, 0, 0, 0, 0, 0, 0.2, 0.2],
    {"draft": 6, "plain": 2},
    {"0": 2, "4": 6},
    {"lora": 1},
)


def test_rates_and_shares_of_the_interval():
    now = top.difference(BEFORE, AFTER, 2.0)
    assert now["tokens_per_second"] == (10 + 4 + 24) / 2
    assert now["accept_length"] == 38 / 14
    assert now["steps"] == {"draft": 5, "plain": 2} and now["draft_lengths"] == {"0": 2, "4": 5}
    assert now["model_drafts"] == {"proposed": 26, "accepted": 16}
    assert now["copied_drafts"] == {"proposed": 10, "accepted": 8}
    assert round(now["busy_share"], 6) == 0.6 and round(now["time_shares"]["draft"], 6) == round(0.5 / 1.2, 6)
    assert now["undrafted_requests"] == {"lora": 1}


def test_an_idle_server_divides_by_nothing():
    now = top.difference(AFTER, AFTER, 2.0)
    assert now["tokens_per_second"] == 0 and now["accept_length"] is None and now["time_shares"] == {}
    assert "tokens/s" in shown(now)


def test_the_table_shows_it():
    text = shown(top.difference(BEFORE, AFTER, 2.0))
    for part in (
        "19.0",
        "2.71",
        "draft 5  plain 2",
        "16 of 26 kept (62%)",
        "8 of 10 kept (80%)",
        "lora 1",
        "10 used, 30 cached",
    ):
        assert part in text


def shown(now):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(top.table(now))
    return console.export_text()
