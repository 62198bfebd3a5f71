"""Re-encoded rows over SGLang's own allocator and radix tree: what is prefilled, who owns which slot.

The model pass is replaced by a record of what it was asked to compute; memory is the subject here.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_sgl.drafter import space as space_module
from rapid_sgl.drafter.reencoded import Reencoder
from rapid_sgl.drafter.space import DraftSpace

CHUNK, CONTEXT, ROWS = 16, 200, 6


@pytest.fixture(autouse=True, scope="module")
def server_settings():
    """``DraftSpace`` asks SGLang's process-wide settings whether the radix cache is on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(space_module, "get_memory", lambda: SimpleNamespace(disable_radix_cache=False))
        yield


class Pass:
    """Remembers the token that every slot was computed for."""

    def __init__(self):
        self.token_of = {}

    def extend(self, input_ids, rows, prefixes, counts, slots):
        assert len(input_ids) == sum(counts) == len(slots) <= CHUNK
        self.token_of.update(zip(slots.tolist(), input_ids.tolist(), strict=True))


def make(size):
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    allocator = TokenToKVPoolAllocator(size, torch.float32, "cpu", None, need_sort=False)
    table = SimpleNamespace(req_to_token=torch.zeros(ROWS, CONTEXT + 40, dtype=torch.int32))
    space = DraftSpace(table, None, allocator)
    return Reencoder(space, {"same": Pass()}, CHUNK, CONTEXT)


def request(index, salt=None):
    return SimpleNamespace(kv=SimpleNamespace(req_pool_idx=index), extra_key=None, cache_salt=salt)


def fill(reencoder, row, output_ids=(1,)):
    for _ in range(CONTEXT):
        if reencoder.ready(row, output_ids, 4):
            return
        reencoder.advance([(row, output_ids)])
    raise AssertionError("the row is never ready")


def check(reencoder, rows):
    """Every slot has one owner, and every entry holds the token that it should."""
    space, passes = reencoder.space, reencoder.passes["same"]
    free = space.allocator.free_pages.tolist()
    private = [
        slot for row in rows for slot in reencoder.slots(row, row.held, row.allocated - row.held).tolist()
    ]
    tree = space.tree.evictable_size() + space.tree.protected_size()
    assert len(set(free)) == len(free) and len(set(private)) == len(private)
    assert not set(free) & set(private)
    assert len(free) + len(private) + tree == space.size
    for row in rows:
        slots = reencoder.slots(row, 0, len(row.tokens)).tolist()
        assert [passes.token_of[slot] for slot in slots] == list(row.tokens)
        assert not set(slots) & set(free)


def test_prompt_is_prefilled_in_chunks_and_found_again():
    reencoder = make(200)
    prompt = list(range(100, 140))
    row = reencoder.row(request(0), "same", prompt)
    for done in (16, 32, 40):
        assert reencoder.ready(row, [1], 4) == 0
        reencoder.advance([(row, [1])])
        assert len(row.tokens) == done
    assert reencoder.ready(row, [1], 4) == 4 and row.missing([1]) == [1]
    check(reencoder, [row])
    again = reencoder.row(request(1), "same", [*prompt[:30], 7, 8])
    reencoder.advance([(again, [1])])
    assert again.cached == 30 and again.tokens == [*prompt[:30], 7, 8]
    check(reencoder, [row, again])
    salted = reencoder.row(request(2, salt="b"), "same", prompt)
    reencoder.advance([(salted, [1])])
    assert salted.cached == 0


def test_the_variant_that_the_tree_knows_is_taken():
    reencoder = make(200)
    known, unknown = list(range(50)), [9, *range(1, 50)]
    fill(reencoder, reencoder.row(request(0), "same", known))
    assert list(reencoder.row(request(1), "same", unknown, known).prompt) == known
    assert list(reencoder.row(request(1), "same", unknown, [8]).prompt) == unknown


def test_rejected_drafts_are_dropped_and_skipped_tokens_fed():
    reencoder = make(200)
    row = reencoder.row(request(0), "same", [5, 6])
    fill(reencoder, row)
    # one step fed the committed token 1 and drafts 2, 3; the target took 2 and corrected 3 to 9
    row.tokens += [1, 2, 3]
    row.sync([1, 2, 9])
    assert row.tokens == [5, 6, 1, 2] and row.missing([1, 2, 9]) == [9]
    # all drafts were accepted: the last one was never fed
    row.tokens += [9]
    row.sync([1, 2, 9, 4, 8])
    assert row.missing([1, 2, 9, 4, 8]) == [4, 8]


def test_chunk_is_shared_and_the_oldest_row_goes_first():
    reencoder = make(200)
    rows = [reencoder.row(request(i), "same", [i * 100 + j for j in range(12)]) for i in range(3)]
    reencoder.advance([(row, [1]) for row in rows])
    assert [len(row.tokens) for row in rows] == [12, 4, 0]


def test_no_room_and_the_end_of_the_context():
    reencoder = make(30)
    row = reencoder.row(request(0), "same", list(range(60)))
    for _ in range(6):
        reencoder.advance([(row, [1])])
    assert reencoder.ready(row, [1], 4) == 0 and reencoder.refused > 0
    reencoder.release(row)
    check(reencoder, [])
    long = make(400)
    row = long.row(request(0), "same", list(range(CONTEXT - 6)))
    fill(long, row)
    assert long.ready(row, [1, 2, 3], 4) == 0  # 3 committed and 3 drafts would end behind the last position


steps = st.lists(
    st.tuples(st.integers(0, ROWS - 1), st.sampled_from(["work", "accept", "reject", "release"])),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(st.integers(20, 160), steps)
def test_slots_always_have_one_owner(size, plan):
    """Any order of prefill, drafting, acceptance, rejection and release, with and without enough memory."""
    reencoder = make(size)
    rows, outputs = {}, {}
    for index, action in plan:
        if index not in rows:
            shared = list(range(20 + 7 * (index % 3)))
            rows[index] = reencoder.row(request(index), "same", [*shared, 100 + index % 2, *range(9)])
            outputs[index] = [1]
        row, output = rows[index], outputs[index]
        if action == "release":
            reencoder.release(row)
            del rows[index]
        else:
            reencoder.advance([(row, outputs[i]) for i, row in rows.items()])
            if action != "work" and reencoder.ready(row, output, 3):
                draft(reencoder, row, output, accepted=action == "accept")
        check(reencoder, list(rows.values()))
    for row in rows.values():
        reencoder.release(row)
    assert reencoder.space.allocator.available_size() + reencoder.space.tree.evictable_size() == size


def draft(reencoder, row, output, accepted):
    """What a draft loop of three tokens and its verification leave behind."""
    todo, drafts = row.missing(output), [len(output) + i for i in range(3)]
    fed = [*todo, *drafts[:-1]]
    slots = reencoder.slots(row, len(row.tokens), len(fed)).tolist()
    reencoder.passes["same"].token_of.update(zip(slots, fed, strict=True))
    row.tokens += fed
    output += [*drafts, 77] if accepted else [55]
    row.sync(output)
