"""``rapid-sgl top``: what a running server drafts and whether it pays, live in the terminal."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rapid_sgl.cli import options

if TYPE_CHECKING:
    from rich.table import Table

DESCRIPTION = """\
Show, every --interval seconds, what a RAPID server did in between: tokens per second, steps by
decision, where their time went, drafts and how many were kept, the draft lengths that were
chosen, requests without drafts by reason, and the KV slots of re-encoded rows. Ctrl-C ends it.

examples:
  rapid-sgl top
  rapid-sgl top --server http://gpu-7:30000 --interval 5
  rapid-sgl top --once --json | jq .tokens_per_second
"""


def main(argv: Sequence[str]) -> int:
    """Returns 0, 1 when the server cannot be read, 2 on a wrong command line."""
    parser = options.Parser(prog="rapid-sgl top", usage="rapid-sgl top [options]", description=DESCRIPTION)
    add = parser.add_argument
    add("--server", metavar="URL", default="http://127.0.0.1:30000", help="(default: %(default)s)")
    add("--interval", type=float, default=2.0, metavar="S", help="seconds between two looks (default: 2)")
    add("--once", action="store_true", help="one interval, then end")
    add("--json", action="store_true", help="one JSON object per interval")
    args = parser.parse_args(list(argv))
    if args.interval <= 0:
        parser.error(f"--interval {args.interval:g} must be more than 0 seconds")

    from rapid_sgl.http_client import Client, ServerError

    client = Client(args.server, os.environ.get("OPENAI_API_KEY"))
    try:
        _watch(client, args.interval, once=args.once, as_json=args.json)
    except ServerError as error:
        print(f"rapid-sgl top: {error}", file=sys.stderr)
        return 1
    return 0


def _watch(client: Any, interval: float, *, once: bool, as_json: bool) -> None:
    before = _read(client)
    if as_json:
        while True:
            time.sleep(interval)
            after = _read(client)
            print(json.dumps(difference(before, after, interval)), flush=True)
            if once:
                return
            before = after
    from rich.live import Live

    with Live(refresh_per_second=4) as live:
        while True:
            time.sleep(interval)
            after = _read(client)
            live.update(table(difference(before, after, interval)))
            if once:
                return
            before = after


def _read(client: Any) -> dict[str, Any]:
    from rapid_sgl.http_client import ServerError

    states = client.info().raw.get("internal_states") or [{}]
    report = states[0].get("rapid")
    if report is None:
        raise ServerError("the server does not run RAPID; start it with `rapid-sgl serve`")
    result: dict[str, Any] = report
    return result


def difference(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """What happened between two ``rapid`` reports of ``/server_info``, ``seconds`` apart, as plain numbers."""

    def totals(kind: str, key: str) -> float:
        return after[kind][key] - before[kind][key]

    def counts(*path: str) -> dict[str, int]:
        new, old = after, before
        for key in path:
            new, old = new[key], old[key]
        return {key: value - old.get(key, 0) for key, value in new.items() if value - old.get(key, 0)}

    def both(key: str) -> float:
        return totals("drafted", key) + totals("plain", key)

    proposed, accepted = totals("drafted", "proposed"), totals("drafted", "accepted")
    copied, kept = totals("drafted", "copied"), totals("drafted", "copies_accepted")
    requests, step_s = both("requests"), both("step_s")
    phases = {phase: both(f"{phase}_s") for phase in ("encode", "draft", "verify")}
    return {
        "running": after["running"],
        "tokens_per_second": (requests + accepted) / seconds,
        "accept_length": (requests + accepted) / requests if requests else None,
        "steps": counts("pace", "decisions"),
        "draft_lengths": counts("lengths"),
        "model_drafts": {"proposed": proposed - copied, "accepted": accepted - kept},
        "copied_drafts": {"proposed": copied, "accepted": kept},
        "busy_share": step_s / seconds,
        "time_shares": {phase: value / step_s for phase, value in phases.items()} if step_s else {},
        "undrafted_requests": counts("undrafted"),
        "draft_kv": after["draft_kv"],
    }


def table(now: Mapping[str, Any]) -> Table:
    """One interval for people."""
    from rich.table import Table

    grid = Table(show_header=False, box=None)
    grid.add_column(style="bold")
    grid.add_column()
    length = now["accept_length"]
    grid.add_row("running", str(now["running"]))
    grid.add_row("tokens/s", f"{now['tokens_per_second']:.1f}")
    grid.add_row("accept length", "-" if length is None else f"{length:.2f}")
    grid.add_row("steps", _pairs(now["steps"]))
    grid.add_row("draft length", _bars(now["draft_lengths"]))
    for name, key in (("model drafts", "model_drafts"), ("copied drafts", "copied_drafts")):
        proposed, accepted = now[key]["proposed"], now[key]["accepted"]
        share = f" ({accepted / proposed:.0%})" if proposed else ""
        grid.add_row(name, f"{accepted} of {proposed} kept{share}")
    shares = "  ".join(f"{phase} {share:.0%}" for phase, share in now["time_shares"].items())
    grid.add_row("decoding", f"{now['busy_share']:.0%} of the time  {shares}")
    grid.add_row("not drafted", _pairs(now["undrafted_requests"]))
    memory = now["draft_kv"]
    if memory:
        used = memory["size"] - memory["free"] - memory["evictable"]
        grid.add_row("draft KV", f"{used} used, {memory['evictable']} cached, {memory['size']} in all")
    return grid


def _pairs(counts: Mapping[str, int]) -> str:
    return "  ".join(f"{name} {count}" for name, count in counts.items()) or "-"


def _bars(counts: Mapping[str, int]) -> str:
    """Shares of the draft lengths 0, 1, … as a line of block characters."""
    if not counts:
        return "-"
    longest = max(int(length) for length in counts)
    values = [counts.get(str(length), 0) for length in range(longest + 1)]
    blocks = " ▁▂▃▄▅▆▇█"
    bars = "".join(blocks[-(-8 * value // max(values))] for value in values)
    return f"0 {bars} {longest}"
