"""How attention work is cut into parts for threads."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_sgl.platform import kernels_layout as layout
from rapid_sgl.platform.kernels_plan import Queries, make_plan


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 150), st.integers(0, 3000)), min_size=1, max_size=6),
    kv_heads=st.integers(1, 4),
    group=st.sampled_from([1, 3, 8, 64]),
    window=st.sampled_from([-1, 0, 500]),
    threads=st.sampled_from([1, 2, 16]),
)
def test_plan_covers_every_key_once(requests, kv_heads, group, window, threads):
    counts, prefixes = [c for c, _ in requests], [p for _, p in requests]
    firsts = [sum(counts[:b]) for b in range(len(counts))]
    plan = make_plan(
        Queries(row=firsts, first_token=firsts, count=counts, prefix=prefixes),
        kv_heads,
        group,
        window,
        threads,
    )
    assert plan.chunks[0] == 0 and plan.chunks[-1] == len(plan.parts) and (np.diff(plan.chunks) > 0).all()
    merged = {int(first + i) for first, n in plan.merges for i in range(n)}
    assert merged == {i for i, part in enumerate(plan.parts) if part[layout.P_PARTIAL] >= 0}
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for part in plan.parts:
        assert 0 < part[layout.P_NQ] * group <= layout.MAX_ROWS
        for i in range(part[layout.P_NQ]):
            spans.setdefault((int(part[layout.P_TOKEN] + i), int(part[layout.P_HEAD])), []).append(
                (int(part[layout.P_LO]), int(part[layout.P_HI]))
            )
    for b, (count, prefix) in enumerate(requests):
        for i in range(count):
            for head in range(kv_heads):
                pieces = spans.pop((firsts[b] + i, head))
                assert all(left[1] == right[0] for left, right in pairwise(pieces))
                low = max(0, prefix + i - window) if window >= 0 else 0
                assert pieces[0][0] <= low and pieces[-1][1] > prefix + i
    assert not spans


def test_work_is_balanced_over_threads():
    queries = Queries(row=[0], first_token=[0], count=[1], prefix=[6999])
    plan = make_plan(queries, kv_heads=3, group=3, window=-1, threads=2)
    work = plan.parts[:, layout.P_HI] - plan.parts[:, layout.P_LO]
    per_chunk = np.add.reduceat(work, plan.chunks[:-1])
    assert len(per_chunk) >= 6 and per_chunk.max() <= 1.2 * per_chunk.mean()
