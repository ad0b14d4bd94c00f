"""A length head never changes what comes out: greedy by comparison, sampling by enumeration."""

import pytest
import torch

from hf_specbranch import load_demo_pair, specbranch
from hf_specbranch.bench import python_prompts
from hf_specbranch.decoding import drafter as drafter_module

from .heads import Observed, balance, random_head
from .models import assert_counts_add_up, attached, config, prompt, slowly
from .sampling import SMALLEST_P, draw, exact_distribution, p_value, sampling_pair

KINDS = {
    "as shipped": {"seed": 4},
    "as in the paper": {"features": ("hidden", "committed"), "match_size": 0},
    "confidence alone": {"features": ("confidence", "kind"), "match_size": 0},
    "drafted tokens alone": {"features": ("drafted", "probability"), "match_size": 0},
}
SAMPLED_KINDS = (
    "as shipped",
    pytest.param("drafted tokens alone", marks=pytest.mark.slow),
    pytest.param("as in the paper", marks=pytest.mark.slow),
    pytest.param("confidence alone", marks=pytest.mark.slow),
)


def settings_with(head, drafting="sample"):
    return config(gamma=2, k=3, epsilon=0.3, draft_sampling=drafting, length_head=head)


def balanced_head(kind):
    """A head for the sampling pair that holds some drafts back and not others."""
    head = random_head(*sampling_pair(), gamma=2, **KINDS[kind])
    watched = Observed(head, sampling_pair()[0])
    draw(settings_with(watched), samples=1000)
    return balance(head, torch.cat(watched.shown))


@pytest.mark.parametrize("kind", ["as shipped", *(slowly(kind) for kind in KINDS if kind != "as shipped")])
def test_greedy_output_stays_the_targets(kind, target, draft):
    model, inputs = attached(target), {**prompt(3), "max_new_tokens": 24, "do_sample": False}
    head = random_head(target, draft, **KINDS[kind])
    out = model.generate(**inputs, assistant_model=draft, specbranch=config(), length_head=head)
    assert torch.equal(out, target.generate(**inputs))
    assert_counts_add_up(model.specbranch_stats)


@pytest.mark.parametrize("drafting", [pytest.param("greedy", marks=pytest.mark.slow), "sample"])
@pytest.mark.parametrize("kind", SAMPLED_KINDS)
def test_sampled_output_stays_the_targets(kind, drafting):
    settings = settings_with(balanced_head(kind), drafting)
    assert p_value(draw(settings, samples=10_000), exact_distribution(sampling_pair()[0])) > SMALLEST_P


@pytest.mark.parametrize("kind", SAMPLED_KINDS)
def test_balanced_heads_hold_some_drafts_back(kind):
    watched = Observed(balanced_head(kind), sampling_pair()[0])
    draw(settings_with(watched), samples=1000)
    assert 0.05 < (torch.cat(watched.predicted) == 0).float().mean() < 0.95


@pytest.mark.slow
def test_discarding_held_back_tokens_is_noticed(monkeypatch):
    """Discarding drawn tokens after looking at them, and drawing again, is biased; the test must see it."""
    honest, head = drafter_module.Drafter._kept, balanced_head("drafted tokens alone")

    def discard(self, features):
        kept, pending = honest(self, features), self.round.pending
        held = self.round.survived & (kept == 0) & (pending.length > 0)
        pending.end.copy_(torch.where(held, pending.start, pending.end))
        pending.cached.copy_(torch.where(held, torch.minimum(pending.cached, pending.start - 1), pending.cached))
        return kept

    monkeypatch.setattr(drafter_module.Drafter, "_kept", discard)
    settings = settings_with(head)
    assert p_value(draw(settings, books_balance=False), exact_distribution(sampling_pair()[0])) < SMALLEST_P


@pytest.mark.parametrize("name", [slowly("good"), "weak"])
def test_the_shipped_heads_leave_greedy_output_alone(name):
    target, draft, tokenizer, head = load_demo_pair(name, head=True)
    batch = tokenizer([p.prompt for p in python_prompts()[:2]], return_tensors="pt", padding=True)
    plain = target.generate(**batch, do_sample=False, max_new_tokens=16)
    model = specbranch(target, draft=draft, head=head)
    assert torch.equal(model.generate(**batch, do_sample=False, max_new_tokens=16), plain)
    assert_counts_add_up(model.specbranch_stats)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["good", "weak"])
def test_shipped_heads_keep_the_sampled_distribution(name):
    """The two commonest tokens at each of the first positions, against plain sampling."""
    target, draft, tokenizer, head = load_demo_pair(name, head=True)
    ids = tokenizer("def add(a, b):\n    return", return_tensors="pt")["input_ids"].expand(500, -1)
    settings = dict(do_sample=True, temperature=0.8, top_k=0, max_new_tokens=5, attention_mask=torch.ones_like(ids))
    torch.manual_seed(0)
    plain = torch.cat([target.generate(ids, **settings) for _ in range(4)])[:, ids.shape[1] :]
    model = specbranch(target, draft=draft, head=head)
    ours = torch.cat([model.generate(ids, **settings) for _ in range(4)])[:, ids.shape[1] :]
    for position in range(5):
        for token in plain[:, position].bincount().topk(2).indices:
            a, b = ((texts[:, position] == token).double().mean() for texts in (plain, ours))
            spread = (2 * a * (1 - a) / len(plain)).sqrt()
            assert abs(a - b) <= 4.5 * spread + 1e-3
