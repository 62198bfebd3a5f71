"""A tree of drafts in closed form: expected laws from the formulas, and the laws that ``verify_chain`` realises.

Acceptance probabilities and closing laws are read off ``verify_chain`` by bisecting the uniforms it is given, and
the law of what it emits follows by enumerating every chain of drafts. No step samples.
"""

import itertools

import numpy as np
import torch
from law_cases import ALMOST_ONE, np_laws

from rapid_sgl.verify.law import Law, draft_probs, verify_chain

V = 5


class Tree:
    """Random target and draft logits at every prefix of up to ``n`` tokens, laid out as the V^n chains.

    ``position`` tokens were generated before the first draft.

    ``accept[i]`` [chains] is the measured probability that draft i is accepted once reached, ``closing[i]``
    [chains, V] the measured law of the token emitted at position i when the drafts before it stand and draft i
    (if i < n) is rejected; meaningless for a chain that cannot stop there.
    """

    def __init__(self, n, row, seed, dtype=torch.float64, position=0):
        rng = np.random.default_rng(seed)
        self.n, self.row, self.position = n, row, position
        self.z = [rng.normal(size=(V,) * (i + 1)) * 1.5 for i in range(n + 1)]
        self.w = [level + rng.normal(size=level.shape) for level in self.z[:n]]
        self.chains = list(itertools.product(range(V), repeat=n))
        self.law = Law.from_rows([row] * len(self.chains))
        self.z_rows, self.w_rows = self.rows_of(self.z, dtype), self.rows_of(self.w, dtype)
        self.q_rows = torch.stack([draft_probs(self.w_rows[:, i], self.law) for i in range(n)], 1)
        self.laws = self.expected(position)
        self.measure()

    def expected(self, position, row=None):
        """(p, q, p̂) at every prefix, from the formulas, for a chain that begins after ``position`` tokens."""
        row = row or self.row
        return [
            {
                at: np_laws(self.z[i][at], self.w[i][at], row, position + i)
                for at in itertools.product(range(V), repeat=i)
            }
            for i in range(self.n)
        ]

    def rows_of(self, levels, dtype):
        rows = [[level[chain[:i]] for i, level in enumerate(levels)] for chain in self.chains]
        return torch.tensor(np.array(rows), dtype=dtype)

    def measure(self):
        """Bisect one uniform per experiment; experiments x chains are one batch of ``verify_chain``."""
        n, count = self.n, len(self.chains)
        accepts = [(i, 0, None) for i in range(n)]
        draws = [(i, 1, token) for i in range(n + 1) for token in range(V - 1)]
        experiments = accepts + draws
        u = torch.zeros(len(experiments), count, n + 1, 2, dtype=torch.float64)  # 0 accepts what can be
        for e, (i, stream, _) in enumerate(experiments):
            if stream == 1 and i < n:
                u[e, :, i, 0] = ALMOST_ONE  # reject draft i

        def below(guess):
            """bool [experiments, chains]: is draft i accepted, or a token <= ``token`` drawn, at this uniform?"""
            for e, (i, stream, _) in enumerate(experiments):
                u[e, :, i, stream] = guess[e]
            verdict = repeated_verify(self, u.flatten(0, 1))
            lens, tokens = verdict.accept_lens.view(-1, count), verdict.tokens.view(-1, count, n + 1)
            return torch.stack(
                [
                    lens[e] > i if stream == 0 else tokens[e, :, i] <= token
                    for e, (i, stream, token) in enumerate(experiments)
                ]
            )

        shares = share_of_unit_interval(below, (len(experiments), count))
        self.accept = shares[:n]
        steps = shares[n:].reshape(n + 1, V - 1, count).transpose(0, 2, 1)
        self.closing = np.diff(steps, prepend=0.0, append=1.0, axis=2)


def repeated_verify(tree, u):
    """``verify_chain`` on the tree's chains, repeated to the length of ``u`` [m * chains, n+1, 2]."""
    rows = torch.arange(len(tree.chains)).repeat(len(u) // len(tree.chains))
    lens = torch.full((len(u),), tree.n)
    drafts = torch.tensor(tree.chains)[rows]
    position = torch.full_like(lens, tree.position)
    z, w, q = tree.z_rows[rows], tree.w_rows[rows], tree.q_rows[rows]
    return verify_chain(z, w, q, drafts, lens, tree.law.select(rows), u, position)


def share_of_unit_interval(below, shape):
    """Where ``below`` turns from true to false on [0, 1), elementwise, to 2^-34; 0 if never true, 1 if always."""
    low, high = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
    never, always = ~below(low), below(torch.full_like(low, ALMOST_ONE))
    for _ in range(34):
        middle = (low + high) / 2
        true = below(middle)
        low, high = torch.where(true, middle, low), torch.where(true, high, middle)
    return torch.where(never, 0.0, torch.where(always, 1.0, low)).numpy()


def emitted_law(tree):
    """Measured joint law of the first n tokens, a chain that stops early being continued by p̂ itself."""
    joint = np.zeros((V,) * tree.n)
    for row, chain in enumerate(tree.chains):
        reached = 1.0  # probability that this chain is drafted up to here and accepted
        for i, token in enumerate(chain):
            q = tree.q_rows[row, i].double().numpy()
            # what is drafted after a rejection is immaterial: count it once, on the chain that ends in zeros
            stop = reached * q[token] * (1 - tree.accept[i][row])
            if stop > 0 and not any(chain[i + 1 :]):
                for t in range(V):
                    continue_from((*chain[:i], t), stop * tree.closing[i][row, t], tree.laws, joint)
            reached *= q[token] * tree.accept[i][row]
        joint[chain] += reached
    return joint


def continue_from(prefix, mass, laws, joint):
    if len(prefix) == len(laws):
        joint[prefix] += mass
        return
    p_hat = laws[len(prefix)][prefix][2]
    for t in range(V):
        continue_from((*prefix, t), mass * p_hat[t], laws, joint)


def expected_law(tree, laws=None):
    """Π p̂ from the formulas, or of other ``laws`` (see ``Tree.expected``)."""
    laws = laws or tree.laws
    joint = np.zeros((V,) * tree.n)
    for chain in tree.chains:
        joint[chain] = np.prod([laws[i][chain[:i]][2][token] for i, token in enumerate(chain)])
    return joint
