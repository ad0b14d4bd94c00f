"""Sampled output has exactly the target's distribution, and the test that says so notices when it has not."""

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

from hf_specbranch import SpeculationHook
from hf_specbranch.decoding import acceptance as acceptance_module
from hf_specbranch.decoding import drafter as drafter_module
from hf_specbranch.decoding import verifier as verifier_module

from .models import config, pairs, slowly
from .sampling import (
    FEWER_SAMPLES,
    FEWEST_SAMPLES,
    QUICK_SAMPLES,
    SAMPLES,
    SMALLEST_P,
    draw,
    exact_distribution,
    p_value,
    sampling_pair,
)

DRAFTING = ("greedy", "sample")
# Variations of the policies: quickly with sampled drafts, and with more samples and both ways to draft.
VARIED = (("sample", QUICK_SAMPLES), *(slowly(each, FEWER_SAMPLES) for each in DRAFTING))
varied = pytest.mark.parametrize(("drafting", "samples"), VARIED)


def assert_exact(settings, **run):
    model, _ = sampling_pair()
    expected = exact_distribution(model, run.get("processors", ()))
    assert p_value(draw(settings, **run), expected) > SMALLEST_P


def assert_biased(settings, **run):
    model, _ = sampling_pair()
    expected = exact_distribution(model, run.get("processors", ()))
    assert p_value(draw(settings, books_balance=False, **run), expected) < SMALLEST_P


@pytest.mark.parametrize("samples", [FEWER_SAMPLES, slowly(SAMPLES)])
@pytest.mark.parametrize(
    ("policy", "drafting"), [*(slowly("vanilla", each) for each in DRAFTING), *pairs(["specbranch", "pearl"], DRAFTING)]
)
def test_every_policy_samples_from_the_target(policy, drafting, samples):
    assert_exact(config(policy, gamma=2, k=3, epsilon=0.5, draft_sampling=drafting), samples=samples)


@varied
def test_branches_for_corrections_leave_the_distribution_alone(drafting, samples):
    settings = config("specbranch", gamma=2, k=3, epsilon=0.2, draft_sampling=drafting, max_rejection_branches=4)
    assert_exact(settings, samples=samples)


@pytest.mark.parametrize(
    ("policy", "rejection_branches"), [slowly("vanilla", 0), slowly("specbranch", 0), ("specbranch", 4)]
)
@varied
def test_tree_leaves_leave_the_distribution_alone(drafting, samples, policy, rejection_branches):
    more = {"draft_sampling": drafting, "max_rejection_branches": rejection_branches, "tree_leaves": 4}
    assert_exact(config(policy, gamma=2, k=3, epsilon=0.0, **more), samples=samples)


@pytest.mark.slow
def test_a_bonus_token_chosen_by_the_draft_is_noticed(monkeypatch):
    honest = verifier_module.Verifier.continue_leaves

    def most_likely(self, acceptance, logits, draft_tokens):
        continuation = honest(self, acceptance, logits, draft_tokens)
        choices = logits.argmax(-1)
        return (
            acceptance_module.continue_leaf(acceptance, choices, draft_tokens.leaves.tokens, draft_tokens.leaves.at)
            if draft_tokens.leaves
            else continuation
        )

    monkeypatch.setattr(verifier_module.Verifier, "continue_leaves", most_likely)
    assert_biased(config("specbranch", gamma=2, k=3, epsilon=0.0, tree_leaves=4), samples=20_000)


def test_the_autoregressive_policy_samples_from_the_target():
    assert_exact(config("autoregressive"), samples=QUICK_SAMPLES)


@varied
def test_fixed_length_drafts_sample_from_the_target(drafting, samples):
    assert_exact(config("vanilla", gamma=3, epsilon=0.0, draft_sampling=drafting), samples=samples)


@pytest.mark.compat
@pytest.mark.matrix
@varied
def test_the_sequential_loop_samples_from_the_target(drafting, samples):
    settings = config("specbranch", gamma=1, k=4, epsilon=0.4, draft_sampling=drafting, overlap=False)
    assert_exact(settings, samples=samples)


@pytest.mark.parametrize(
    ("policy", "drafting", "samples"),
    [
        ("vanilla", "sample", FEWEST_SAMPLES),
        *(slowly(policy, drafting, 6_000) for policy in ("vanilla", "pearl", "specbranch") for drafting in DRAFTING),
    ],
)
def test_processors_shape_the_distribution_as_in_plain_generate(policy, drafting, samples):
    """Few samples: processors that read the text run row by row."""
    processors = [RepetitionPenaltyLogitsProcessor(1.4), TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.95)]
    settings = config(policy, gamma=2, k=3, epsilon=0.5, draft_sampling=drafting)
    assert_exact(settings, processors=processors, samples=samples)


class FavourRepeats(LogitsProcessor):
    """A user's processor: nothing is known about it, so it is only shown text that is final."""

    def __call__(self, input_ids, scores):
        return scores.scatter_add(1, input_ids[:, -1:], torch.ones_like(input_ids[:, -1:], dtype=scores.dtype))


@pytest.mark.parametrize("samples", [QUICK_SAMPLES, slowly(FEWER_SAMPLES)])
def test_a_users_processor_shapes_the_distribution_as_in_plain_generate(samples):
    assert_exact(config("specbranch", gamma=2, k=3, epsilon=0.5), processors=[FavourRepeats()], samples=samples)


class Whimsical(SpeculationHook):
    """Cuts and forks by everything a hook can see: tokens, confidences, lengths."""

    def stop(self, state):
        return (state.scores * state.scores.clamp(min=1e-9).log()).sum(-1) < -1.1

    def fork(self, state):
        return 1 + state.length % 3

    def keep(self, survivor):
        odd = survivor.tokens[:, 0] % 2 == 1
        unsure = survivor.confidence[:, -1] < 0.5
        return torch.where(odd | unsure, 0, survivor.length)


@varied
def test_hooks_that_cut_chains_leave_the_distribution_alone(drafting, samples):
    settings = config("specbranch", gamma=2, k=3, epsilon=0.3, draft_sampling=drafting)
    assert_exact(settings, hooks=[Whimsical()], samples=samples)


@pytest.mark.parametrize("prediction", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 2))])
def test_a_length_head_leaves_the_distribution_alone(prediction):
    def head(survivor):
        return torch.full_like(survivor.length, prediction)

    settings = config("specbranch", gamma=2, k=3, epsilon=0.5, draft_sampling="sample", length_head=head)
    assert_exact(settings, samples=QUICK_SAMPLES)


# ---- the test must be able to fail


@pytest.mark.parametrize(
    ("samples", "shift"), [(SAMPLES, 0.02), (FEWER_SAMPLES, 0.03), (QUICK_SAMPLES, 0.04), (FEWEST_SAMPLES, 0.07)]
)
def test_a_small_bias_is_noticed(samples, shift):
    model, _ = sampling_pair()
    expected = exact_distribution(model)
    biased = expected.copy()
    biased *= 1 - shift
    biased[: len(biased) // 4] += shift * expected[: len(biased) // 4] / expected[: len(biased) // 4].sum()
    noticed = [p_value(np.random.default_rng(s).multinomial(samples, biased), expected) < SMALLEST_P for s in range(20)]
    assert sum(noticed) >= 14
    fair = [p_value(np.random.default_rng(s).multinomial(samples, expected), expected) > SMALLEST_P for s in range(20)]
    assert all(fair)


def test_a_residual_that_is_not_normalised_is_noticed(monkeypatch):
    def unnormalised(p, q):
        rest = (p - q).clamp(min=0)
        rest[..., -1] += 1 - rest.sum(-1)  # where inverse sampling ends up when the sum falls short of 1
        return rest

    monkeypatch.setattr(acceptance_module, "residual", unnormalised)
    assert_biased(config("vanilla", gamma=2, epsilon=0.0, draft_sampling="sample"), samples=QUICK_SAMPLES)


@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.slow
def test_choosing_the_branch_with_the_largest_p_is_noticed(monkeypatch, drafting):
    honest = verifier_module.Verifier.accept

    def greedy_at_the_fork(self, logits, draft_tokens, branches):
        acceptance, scores = honest(self, logits, draft_tokens, branches)
        if not branches.tokens.shape[1]:  # the prompt was read
            return acceptance, scores
        at_point = scores[torch.arange(len(scores)), draft_tokens.length]
        there = branches.at == draft_tokens.length[:, None]
        best = at_point.gather(1, branches.tokens).masked_fill(~there, float("-inf")).argmax(1)
        forked = (acceptance.accepted == draft_tokens.length) & (there.sum(1) > 1)
        token = torch.where(forked, branches.tokens.gather(1, best[:, None])[:, 0], acceptance.token)
        return acceptance_module.Acceptance(
            acceptance.accepted, token, torch.where(forked, best, acceptance.survivor)
        ), scores

    monkeypatch.setattr(verifier_module.Verifier, "accept", greedy_at_the_fork)
    assert_biased(config("specbranch", gamma=2, k=3, epsilon=0.5, draft_sampling=drafting))


@pytest.mark.slow
def test_cutting_a_chain_by_the_probability_of_the_drawn_token_is_noticed(monkeypatch):
    honest = drafter_module.Drafter._send

    def cut_unlikely_tokens(self, features):
        pending, longest = self.round.pending, self.gamma
        chosen = pending.first_scores(longest).gather(2, pending.tokens(longest)[:, :, None])[:, :, 0]
        likely = (chosen >= 0.5).long().cumprod(1).sum(1)
        pending.end.copy_(pending.start + torch.minimum(likely, pending.length))
        honest(self, features)

    monkeypatch.setattr(drafter_module.Drafter, "_send", cut_unlikely_tokens)
    assert_biased(config("vanilla", gamma=2, epsilon=0.0, draft_sampling="sample"))


@pytest.mark.slow
def test_dropping_a_survivor_after_seeing_its_tokens_is_noticed(monkeypatch):
    """What a cut must not do: throw drawn tokens away because of what was drawn, and draw again."""
    honest = drafter_module.Drafter._kept

    def redraw(self, features):
        honest(self, features)
        pending = self.round.pending
        odd = self.round.survived & (pending.length > 0) & (pending.tokens(1)[:, 0] % 2 == 1)
        pending.end.copy_(torch.where(odd, pending.start, pending.end))
        pending.cached.copy_(torch.where(odd, torch.minimum(pending.cached, pending.start - 1), pending.cached))
        return pending.length

    monkeypatch.setattr(drafter_module.Drafter, "_kept", redraw)
    assert_biased(config("specbranch", gamma=2, k=2, epsilon=1.0, draft_sampling="sample"))


@pytest.mark.parametrize(
    ("policy", "drafting"), [*(slowly("vanilla", each) for each in DRAFTING), *pairs(["specbranch", "pearl"], DRAFTING)]
)
def test_the_same_seed_gives_the_same_text(policy, drafting):
    settings = config(policy, gamma=2, k=3, epsilon=0.5, draft_sampling=drafting)
    first, second = (draw(settings, samples=1000, seed=11) for _ in range(2))
    other = draw(settings, samples=1000, seed=12)
    assert (first == second).all() and (first != other).any()
