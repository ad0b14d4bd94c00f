"""The verdict on its own: no models, closed forms and large vectorised draws."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from hf_specbranch.decoding.acceptance import NONE, accept_choices, accept_samples, acceptance_probability, residual


def distributions(size=5):
    weights = st.lists(st.integers(0, 20), min_size=size, max_size=size).filter(any)
    return weights.map(lambda w: torch.tensor(w, dtype=torch.float64) / sum(w))


@given(distributions(), distributions())
def test_acceptance_and_residual_together_reproduce_p(p, q):
    stands = acceptance_probability(p, q)
    rejected = (q * (1 - stands)).sum()
    assert torch.allclose(q * stands + rejected * residual(p, q), p, atol=1e-12)


@given(distributions(), distributions())
def test_the_residual_is_a_distribution(p, q):
    rest = residual(p, q)
    assert (rest >= 0).all() and torch.allclose(rest.sum(), torch.tensor(1.0, dtype=torch.float64))


@given(distributions(), distributions(), st.data())
def test_drawing_from_p_and_looking_among_branches_reproduces_p_for_any_set_of_branches(p, q, data):
    branches = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True))
    probability = torch.zeros(5, dtype=torch.float64)
    for choice in range(5):
        acceptance = accept_choices(
            torch.tensor([[choice]]),
            torch.zeros((1, 0), dtype=torch.long),
            torch.tensor([0]),
            torch.tensor([branches]),
            torch.zeros((1, len(branches)), dtype=torch.long),
        )
        probability[int(acceptance.token)] += p[choice]
        survivor = int(acceptance.survivor)
        assert (survivor == NONE) == (choice not in branches)
        assert survivor == NONE or branches[survivor] == choice
    assert torch.allclose(probability, p)


@given(st.lists(st.integers(0, 3), min_size=0, max_size=5), st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_choices_are_followed_up_to_the_first_difference(draft_tokens, choices):
    acceptance = accept_choices(
        torch.tensor([choices[: len(draft_tokens) + 1]]),
        torch.tensor([draft_tokens], dtype=torch.long).view(1, -1),
        torch.tensor([len(draft_tokens)]),
        torch.tensor([[0]]),
        torch.tensor([[NONE]]),
    )
    agreed = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(draft_tokens, choices))))
    assert (int(acceptance.accepted), int(acceptance.token)) == (agreed, choices[agreed])


def test_padding_behind_a_short_chain_is_never_accepted():
    acceptance = accept_choices(
        choices=torch.tensor([[1, 1, 1], [1, 1, 1]]),
        draft_tokens=torch.tensor([[1, 1], [1, 1]]),
        length=torch.tensor([1, 2]),
        branches=torch.tensor([[1], [1]]),
        at=torch.tensor([[NONE], [2]]),
    )
    assert acceptance.accepted.tolist() == [1, 2]
    assert acceptance.survivor.tolist() == [NONE, 0]


def test_a_branch_survives_only_where_the_verdict_ends():
    acceptance = accept_choices(
        choices=torch.tensor([[1, 5, 6], [4, 2, 6], [1, 2, 6]]),
        draft_tokens=torch.tensor([[1, 2]]).expand(3, -1),
        length=torch.tensor([2, 2, 2]),
        branches=torch.tensor([[6, 4, 5]]).expand(3, -1),
        at=torch.tensor([[2, 0, 1], [2, 1, 0], [2, 0, 1]]),
    )
    assert acceptance.accepted.tolist() == [1, 0, 2]
    assert acceptance.survivor.tolist() == [2, NONE, 0]  # the second row's 4 was foreseen elsewhere


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 2), st.integers(0, 3))
def test_samples_have_the_joint_distribution_of_p(seed, length, width):
    """Chains of up to two drawn tokens and a fork behind them: the committed tokens follow p exactly."""
    rows, size, positions = 200_000, 4, 3
    rng = torch.Generator().manual_seed(seed)
    p, q = (torch.rand((positions, size), generator=rng, dtype=torch.float64).pow(3) + 1e-3 for _ in range(2))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    drawn = torch.stack([torch.multinomial(q[j], rows, True, generator=rng) for j in range(positions)], 1)
    main = drawn[:, length]
    favoured = q[length].expand(rows, -1).scatter(1, main[:, None], 2.0)
    branches = favoured.topk(max(width, 1), dim=-1).indices
    acceptance = accept_samples(
        p[None, : length + 1].expand(rows, -1, -1),
        q[None, : length + 1].expand(rows, -1, -1),
        drawn[:, :length],
        torch.full((rows,), length),
        branches,
        torch.where(torch.arange(branches.shape[1]) < width, length, NONE).expand(rows, -1),
        rng,
    )
    # The first committed token of every row follows p at its position; so does the last, given where it stands.
    first = torch.where(acceptance.accepted > 0, drawn[:, 0], acceptance.token)
    assert chisquare(first.bincount(minlength=size), p[0] * rows / p[0].sum()).pvalue > 1e-5
    whole = acceptance.accepted == length
    counts = acceptance.token[whole].bincount(minlength=size)
    assert chisquare(counts, p[length] * whole.sum() / p[length].sum()).pvalue > 1e-5


def test_a_sibling_survives_when_the_residual_draws_its_token():
    rows = 1000
    p, q = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[1.0, 0.0]]])
    acceptance = accept_samples(
        p.expand(rows, -1, -1),
        q.expand(rows, -1, -1),
        torch.zeros((rows, 0), dtype=torch.long),
        torch.zeros(rows, dtype=torch.long),
        torch.tensor([[0, 1]]).expand(rows, -1),
        torch.zeros((rows, 2), dtype=torch.long),
        torch.Generator().manual_seed(0),
    )
    assert (acceptance.token == 1).all() and (acceptance.survivor == 1).all()


@pytest.mark.parametrize("width", [0, 1])
def test_equal_distributions_accept_everything(width):
    p = torch.full((64, 3, 4), 0.25)
    draft_tokens = torch.randint(0, 4, (64, 2))
    length, branch = torch.full((64,), 2), torch.randint(0, 4, (64, 1))
    at = torch.full((64, 1), 2 if width else NONE)
    acceptance = accept_samples(p, p, draft_tokens, length, branch, at, torch.Generator().manual_seed(0))
    assert (acceptance.accepted == 2).all()
    assert (acceptance.survivor == (0 if width else NONE)).all()
