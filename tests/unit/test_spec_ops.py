"""Torch versions of SGLang's tree kernels, against definitions of their own."""

import pytest
import torch

from rapid_sgl.platform import spec_ops

# parents of nodes 1.. in three trees: a chain, branches, and a comb
TREES = [[0, 1, 2, 3], [0, 0, 1, 1], [0, 1, 0, 3]]


def ancestors(parents):
    """bool [n, n]: node j is on the path to node i, itself included."""
    n = len(parents) + 1
    mask = torch.eye(n, dtype=torch.bool)
    for node, parent in enumerate(parents, start=1):
        mask[node] |= mask[parent]
    return mask


def links(trees):
    """What ``reconstruct_indices_from_tree_mask`` makes of the trees; (positions, index, next, sibling)."""
    bs, n = len(trees), len(trees[0]) + 1
    out = [torch.full((bs, n), -9, dtype=torch.int64) for _ in range(4)]
    masks = torch.stack([ancestors(tree) for tree in trees])
    lens = torch.arange(100, 100 + bs)
    spec_ops.reconstruct_indices_from_tree_mask(masks.flatten(), lens, *out, bs, n)
    return out


def test_links_lead_to_every_child_and_positions_are_depths():
    positions, index, first, following = links(TREES)
    assert index.tolist() == torch.arange(15).view(3, 5).tolist()
    for request, parents in enumerate(TREES):
        depth = ancestors(parents).sum(-1) - 1
        assert positions[request].tolist() == (depth + 100 + request).tolist()
        for node in range(5):
            below, child = [], int(first[request, node])
            while child != -1:
                below.append(child)
                child = int(following[request, child])
            assert below == [child for child, parent in enumerate(parents, start=1) if parent == node]


def test_links_agree_with_sglangs_own_host_version():
    """``_derive_tree_links`` is what SGLang itself computes on the host for its grammar masks."""
    spec_ops_registered()
    from sglang.srt.speculative.ngram_worker import _derive_tree_links

    masks = torch.stack([ancestors(tree) for tree in TREES])
    wanted = _derive_tree_links(masks.numpy(), len(TREES), 5)
    _, _, first, following = links(TREES)
    assert torch.equal(first, wanted[0]) and torch.equal(following, wanted[1])


def spec_ops_registered():
    from rapid_sgl.server_patches.spec_baselines import provide_kernels

    provide_kernels()


@pytest.mark.parametrize("mode", [0, 1])
def test_a_chain_of_the_draft_worker(mode):
    """topk 1: candidate i hangs below candidate i - 1; the mask shows prefix and earlier drafts."""
    lens, n = torch.tensor([3, 5]), 4
    parent_list = torch.tensor([[-1, 0, 1]] * 2)
    chosen = torch.tensor([[0, 1, 2]] * 2)
    size = 2 * n * n if mode else int((lens + n).sum()) * n
    mask = torch.ones(size, dtype=torch.bool)
    positions = torch.zeros(2 * n, dtype=torch.int64)
    index, first, following = (torch.full((2, n), -1, dtype=torch.int64) for _ in range(3))
    spec_ops.build_tree(parent_list, chosen, lens, mask, positions, index, first, following, 1, 3, n, mode)
    assert positions.tolist() == [3, 4, 5, 6, 5, 6, 7, 8]
    assert first.tolist() == [[1, 2, 3, -1]] * 2 and following.tolist() == [[-1] * 4] * 2
    at = 0
    for length in lens.tolist():
        width = n + (0 if mode else length)
        rows = mask[at : at + n * width].view(n, width)
        assert torch.equal(rows[:, width - n :], torch.ones(n, n, dtype=torch.bool).tril())
        assert rows[:, : width - n].all()
        at += n * width


def verify(trees, tokens, wanted, depth=5):
    _, index, first, following = links(trees)
    predicts = torch.full((index.numel(),), -1, dtype=torch.int32)
    accepted = torch.full((len(trees), depth), -1, dtype=torch.int32)
    count = torch.empty(len(trees), dtype=torch.int32)
    spec_ops.verify_tree_greedy(
        predicts, accepted, count, torch.tensor(tokens), index, first, following, torch.tensor(wanted)
    )
    return predicts, accepted, count


def test_greedy_verification_follows_the_target():
    # The target wants 7 after node 0, which node 2 is; then 9, which node 4 is not, it hangs below node 1.
    predicts, accepted, count = verify([TREES[1]], [[1, 5, 7, 8, 9]], [[7, 0, 9, 0, 0]])
    assert accepted[0].tolist() == [0, 2, -1, -1, -1] and count.tolist() == [1]
    assert predicts[[0, 2]].tolist() == [7, 9]
    # A whole chain, and what follows it.
    predicts, accepted, count = verify([TREES[0]], [[1, 2, 3, 4, 5]], [[2, 3, 4, 5, 6]])
    assert accepted[0].tolist() == [0, 1, 2, 3, 4] and count.tolist() == [4]
    assert predicts.tolist() == [2, 3, 4, 5, 6]


def test_tree_sampling_keeps_the_targets_law():
    """The first token of many trees is distributed as the target's, whatever the drafts are."""
    torch.manual_seed(0)
    n, vocabulary, law = 1000, 4, torch.tensor([0.1, 0.2, 0.3, 0.4])
    trees = [[0, 0, 1, 1]] * n
    _, index, first, following = links(trees)
    tokens = torch.tensor([[0, 3, 1, 2, 0]] * n)
    probs = law.expand(n, 5, vocabulary).contiguous()
    predicts = torch.zeros(n * 5, dtype=torch.int32)
    accepted = torch.full((n, 5), -1, dtype=torch.int32)
    count = torch.empty(n, dtype=torch.int32)
    spec_ops.tree_sampling(
        predicts, accepted, count, tokens, index, first, following, torch.rand(n, 5), torch.rand(n), probs,
        torch.zeros_like(probs),
    )  # fmt: skip
    emitted = torch.bincount(predicts.view(n, 5)[:, 0].long(), minlength=vocabulary)
    chi2 = ((emitted - n * law) ** 2 / (n * law)).sum()
    assert chi2 < 16.3, emitted.tolist()  # 99.9 % quantile at three degrees of freedom
    assert 0 < count.float().mean() < 2


def test_slots_and_bonus_tokens():
    table = torch.arange(60, dtype=torch.int32).view(3, 20)
    rows, starts = torch.tensor([2, 0]), torch.tensor([4, 7])
    slots = spec_ops.extend_cache_locs(rows, table, starts, starts + 3, 2, 3, "cpu")
    assert slots.tolist() == [44, 45, 46, 7, 8, 9] and slots.dtype == torch.int64
    out, positions = torch.zeros(6, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    spec_ops.draft_cache_locs(rows, table, starts, out, 1, 3, positions)
    assert torch.equal(out, slots) and positions.tolist() == [4, 7]
    bonus = torch.zeros(2, dtype=torch.int32)
    spec_ops.bonus_tokens(torch.tensor([5, 6, 0, 7, 8, 9]), torch.tensor([2, 3]), bonus, 3, 2)
    assert bonus.tolist() == [6, 9]
    moved = torch.zeros(4, dtype=torch.int64)
    spec_ops.accept_out_cache_loc(torch.tensor([[0, -1], [3, -1]]), slots, moved, 4)
    assert moved.tolist() == [44, 7, 0, 0]


def test_renormalised_filters():
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.25, 0.5, 0.15, 0.1]])
    top_k = spec_ops.top_k_renorm(probs, torch.tensor([2, 1]))
    assert torch.allclose(top_k, torch.tensor([[4 / 7, 3 / 7, 0, 0], [0, 1, 0, 0]]))
    top_p = spec_ops.top_p_renorm(probs, torch.tensor([0.65, 0.5]))
    assert torch.allclose(top_p, torch.tensor([[4 / 7, 3 / 7, 0, 0], [0, 1, 0, 0]]))


def test_front_slots_are_packed():
    packed = torch.zeros(6, dtype=torch.int64)
    spec_ops.front_cache_locs(torch.tensor([2, 0, 1]), torch.tensor([10, 11, 20, 21, 30, 31]), packed)
    assert packed.tolist() == [10, 11, 30, 0, 0, 0]
