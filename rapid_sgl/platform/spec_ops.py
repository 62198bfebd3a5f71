"""What SGLang's own speculative algorithms compute outside the model, for torch's CPU device.

SGLang has these as CUDA, Triton or AMX kernels. Trees are a few dozen tokens per request, so plain loops on the host
are quick enough. Names and argument orders are SGLang's; ``server_patches/spec_baselines.py`` puts them in place.

A tree of n drafts, node 0 the last committed token, is linked by ``retrieve_next_token`` (first child of a node)
and ``retrieve_next_sibling``, -1 where there is none; ``retrieve_index`` is a node's place in the flat batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch


def extend_cache_locs(
    req_pool_indices: torch.Tensor,  # int [bs], row of each request
    req_to_token: torch.Tensor,  # int [rows, max_len], slot of every token
    start_offset: torch.Tensor,  # int [bs]
    end_offset: torch.Tensor,  # int [bs], start_offset + draft_token_num
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> torch.Tensor:
    """The slots of tokens [start, end) of every row, int64 [bs * draft_token_num]."""
    columns = start_offset.long()[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices.long()[:, None], columns].reshape(-1).to(device, torch.int64)


def front_cache_locs(
    num_front: torch.Tensor,  # int [bs], slots wanted of each request's window
    out_cache_loc: torch.Tensor,  # int64 [bs * width], windows one after the other
    front_out_cache_loc: torch.Tensor,  # int64 [>= sum(num_front)], written from its start
) -> None:
    """Pack the first ``num_front`` slots of every window."""
    window = out_cache_loc.view(len(num_front), -1)
    front = window[torch.arange(window.shape[1]) < num_front[:, None]]
    front_out_cache_loc[: len(front)] = front


def draft_cache_locs(
    req_pool_indices: torch.Tensor,  # int [bs]
    req_to_token: torch.Tensor,  # int [rows, max_len]
    seq_lens: torch.Tensor,  # int [bs]
    out_cache_loc: torch.Tensor,  # int64 [bs * topk * num_cols], written
    topk: int,
    num_cols: int,
    positions: torch.Tensor | None = None,  # int64 [bs * topk], written
    mrope: torch.Tensor | None = None,
) -> None:
    """The ``topk * num_cols`` slots that follow each row's tokens, and the position of each branch's first draft.

    Raises:
        NotImplementedError: multimodal positions.
    """
    if mrope is not None:
        raise NotImplementedError(
            "SGLang's draft worker has no multimodal positions on the portable CPU platform"
        )
    count = topk * num_cols
    ends = seq_lens + count
    out_cache_loc.copy_(
        extend_cache_locs(req_pool_indices, req_to_token, seq_lens, ends, len(seq_lens), count, "cpu")
    )
    if positions is not None:
        positions.copy_(seq_lens.repeat_interleave(topk))


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,  # bool [bs * n * n]: node j is on the path to node i
    verified_seq_len: torch.Tensor,  # int [bs]
    positions: torch.Tensor,  # int64 [bs * n], written
    retrieve_index: torch.Tensor,  # int64 [bs, n], written, as the two below
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Positions and links of trees that are given by their masks."""
    n = draft_token_num
    earlier = torch.ones(n, n, dtype=torch.bool).tril(-1)
    ancestors = tree_mask.view(batch_size, n, n).bool() & earlier
    positions.view(batch_size, n).copy_(ancestors.sum(-1) + verified_seq_len[:, None])
    retrieve_index.view(-1).copy_(torch.arange(batch_size * n))
    parents = torch.where(ancestors, torch.arange(n), -1).amax(-1).tolist()
    for request, parent_of in enumerate(parents):
        children: list[list[int]] = [[] for _ in range(n)]
        for node, parent in enumerate(parent_of):
            if parent >= 0:
                children[parent].append(node)
        _link(children, retrieve_next_token[request], retrieve_next_sibling[request])


def _link(children: list[list[int]], next_token: torch.Tensor, next_sibling: torch.Tensor) -> None:
    first, following = [-1] * len(children), [-1] * len(children)
    for node, below in enumerate(children):
        if below:
            first[node] = below[0]
            for one, other in pairwise(below):
                following[one] = other
    next_token.copy_(torch.tensor(first))
    next_sibling.copy_(torch.tensor(following))


def build_tree(
    parent_list: torch.Tensor,  # int64 [bs, m]
    top_scores_index: torch.Tensor,  # int64 [bs, n - 1], the drafts among all candidates, ascending
    seq_lens: torch.Tensor,  # int [bs]
    tree_mask: torch.Tensor,  # bool, written: FULL_MASK [sum(n * (seq_len + n))] or QLEN_ONLY [bs * n * n]
    positions: torch.Tensor,  # int64 [bs * n], written
    retrieve_index: torch.Tensor,  # int64 [bs, n], written, as the two below
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """The trees of SGLang's draft worker. Candidate c hangs below candidate ``parent_list[c // topk]``.

    Raises:
        NotImplementedError: a bit-packed mask.
    """
    if int(tree_mask_mode) > 1:  # TreeMaskMode.QLEN_ONLY_BITPACKING
        raise NotImplementedError("bit-packed tree masks are not supported on the portable CPU platform")
    n, at = num_verify_tokens, 0
    retrieve_index.view(-1).copy_(torch.arange(retrieve_index.numel()))
    for request, length in enumerate(seq_lens.tolist()):
        chosen = top_scores_index[request].tolist()
        above = parent_list[request].tolist()
        parents = [-1, *(_parent(candidate, chosen, above, topk) for candidate in chosen)]
        mask = torch.eye(n, dtype=torch.bool)
        children: list[list[int]] = [[] for _ in range(n)]
        for node in range(1, n):
            mask[node] |= mask[parents[node]]
            # SGLang links siblings last first
            children[parents[node]].insert(0, node)
        _link(children, retrieve_next_token[request], retrieve_next_sibling[request])
        positions.view(-1, n)[request] = length + mask.sum(-1) - 1
        width = n + (0 if int(tree_mask_mode) else length)
        tree_mask.view(-1)[at : at + n * width].view(n, width)[:, width - n :] = mask
        at += n * width


def _parent(candidate: int, chosen: list[int], above: list[int], topk: int) -> int:
    """The node that a chosen candidate hangs below; node 0 is the last committed token."""
    group = candidate // topk
    return 0 if group == 0 else chosen.index(above[group]) + 1


def verify_tree_greedy(
    predicts: torch.Tensor,  # int32 [bs * n], written: the target's token after each accepted node
    accept_index: torch.Tensor,  # int32 [bs, depth], written: accepted nodes in the flat batch
    accept_token_num: torch.Tensor,  # int32 [bs], written: accepted drafts, without the target's own token
    candidates: torch.Tensor,  # int64 [bs, n], tokens of the nodes
    retrieve_index: torch.Tensor,  # int64 [bs, n], as the two below
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,  # int64 [bs, n], the target's argmax after each node
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follow the target's argmax through every tree; returns the three written tensors."""
    walk = _Walk(candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, accept_index)
    for request, wanted in enumerate(target_predict.tolist()):
        path = walk.down(request, partial(_agrees, walk.tokens[request], wanted))
        walk.write(request, path, [wanted[node] for node in path], predicts, accept_index, accept_token_num)
    return predicts, accept_index, accept_token_num


def _agrees(tokens: list[int], wanted: list[int], node: int, child: int) -> bool:
    return tokens[child] == wanted[node]


def tree_sampling(
    predicts: torch.Tensor,  # int32 [bs * n], written, as the two below; see verify_tree_greedy
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,  # int64 [bs, n]
    retrive_index: torch.Tensor,  # int64 [bs, n]; SGLang's spelling, as the two below
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,  # float32 [bs, n]
    uniform_samples_for_final_sampling: torch.Tensor,  # float32 [bs]
    target_probs: torch.Tensor,  # float32 [bs, n, vocabulary], after temperature and filters
    draft_probs: torch.Tensor,  # the same shape, zeros; written
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Lossless sampling of a tree whose drafts are points, not samples of a law (SGLang's "target only").

    At each node the target's token is drawn; if it is one of the children, the walk goes on there. The children
    that were refused are out of the final draw. Thresholds below 1 accept more, as in SGLang.
    """
    walk = _Walk(candidates, retrive_index, retrive_next_token, retrive_next_sibling, accept_index)
    coins = uniform_samples.tolist()
    for request in range(candidates.shape[0]):
        reached = [0.0]

        def accepted(node: int, child: int, request: int = request, reached: list[float] = reached) -> bool:
            token = walk.tokens[request][child]
            share = float(target_probs[request, node, token])
            reached[0] += share
            coin = coins[request][node]
            if coin <= reached[0] / threshold_acc or share >= threshold_single:
                reached[0] = 0.0
                return True
            draft_probs[request, node, token] = share
            return False

        path = walk.down(request, accepted)
        last = path[-1]
        rest = (target_probs[request, last] - draft_probs[request, last]).clamp_min(0)
        coin = uniform_samples_for_final_sampling[request] * rest.sum()
        drawn = int(torch.searchsorted(rest.cumsum(0), coin).clamp_max(rest.shape[0] - 1))
        emitted = [*(walk.tokens[request][node] for node in path[1:]), drawn]
        walk.write(request, path, emitted, predicts, accept_index, accept_token_num)


class _Walk:
    """A batch of trees on the host, and the way down each of them."""

    def __init__(
        self,
        candidates: torch.Tensor,
        index: torch.Tensor,
        next_token: torch.Tensor,
        next_sibling: torch.Tensor,
        accept_index: torch.Tensor,
    ) -> None:
        self.tokens: list[list[int]] = candidates.tolist()
        self._index, self._first, self._following = index.tolist(), next_token.tolist(), next_sibling.tolist()
        self._longest = accept_index.shape[1]

    def down(self, request: int, accepted: Callable[[int, int], bool]) -> list[int]:
        """Nodes from the root on, at each of them the first child for which ``accepted(node, child)`` holds."""
        path = [0]
        while len(path) < self._longest:
            child = self._first[request][path[-1]]
            while child != -1 and not accepted(path[-1], child):
                child = self._following[request][child]
            if child == -1:
                break
            path.append(child)
        return path

    def write(
        self,
        request: int,
        path: list[int],
        emitted: list[int],
        predicts: torch.Tensor,
        accept_index: torch.Tensor,
        accept_token_num: torch.Tensor,
    ) -> None:
        """File a path and the token that follows each of its nodes, in the form of SGLang's kernels."""
        places = torch.tensor([self._index[request][node] for node in path])
        predicts[places] = torch.tensor(emitted, dtype=predicts.dtype)
        accept_index[request, : len(path)] = places.to(accept_index.dtype)
        accept_token_num[request] = len(path) - 1


def bonus_tokens(
    accept_tokens: torch.Tensor,  # int [bs * accept_stride]
    accept_lens: torch.Tensor,  # int [bs], the target's own token included
    bonus_tokens: torch.Tensor,  # int [bs], written
    accept_stride: int,
    batch_size: int,
) -> None:
    """The last token that each request committed."""
    table = accept_tokens.view(batch_size, accept_stride)
    bonus_tokens.copy_(table.gather(1, (accept_lens.long() - 1)[:, None])[:, 0])


def accept_out_cache_loc(
    accept_index: torch.Tensor,  # int [size], -1 where nothing was accepted
    out_cache_loc: torch.Tensor,  # int64 [tokens]
    accept_out_cache_loc: torch.Tensor,  # int64, the first entries are written
    size: int,
) -> None:
    """The slots of the accepted nodes, closed up."""
    chosen = accept_index.view(-1)[:size].long()
    chosen = chosen[chosen >= 0]
    accept_out_cache_loc[: len(chosen)] = out_cache_loc[chosen]


def top_k_renorm(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """float32 [n, vocabulary]: each row's ``top_ks`` likeliest tokens (and what ties with the last), renormalised."""
    ranked = probs.sort(-1, descending=True).values
    last = (top_ks.long().clamp(1, probs.shape[-1]) - 1)[:, None]
    return _renormalised(probs, ranked.gather(-1, last))


def top_p_renorm(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """float32 [n, vocabulary]: the likeliest tokens of each row that reach ``top_ps`` together, renormalised."""
    ranked = probs.sort(-1, descending=True).values
    before = ranked.cumsum(-1) - ranked
    kept = (before < top_ps.view(-1, 1)).sum(-1, keepdim=True).clamp_min(1)
    return _renormalised(probs, ranked.gather(-1, kept - 1))


def _renormalised(probs: torch.Tensor, smallest: torch.Tensor) -> torch.Tensor:
    kept = probs.masked_fill(probs < smallest, 0.0)
    return kept / kept.sum(-1, keepdim=True)
