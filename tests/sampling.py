"""Exact target distributions on tiny vocabularies, and the test of samples against them."""

import functools
import itertools

import numpy as np
import torch
from scipy.stats import chi2

from .models import assert_counts_add_up, attached, llama, noisy_copy

VOCABULARY, NEW_TOKENS, ROWS = 4, 4, 1000
# Enough to notice a total bias of 2%, 3%, 4% and 7%.
SAMPLES, FEWER_SAMPLES, QUICK_SAMPLES, FEWEST_SAMPLES = 30_000, 15_000, 8_000, 3_000
# Seeds are fixed, so a test that passes once passes always.
SMALLEST_P = 1e-4
PROMPT = torch.tensor([[1, 2, 1]])
SEQUENCES = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=NEW_TOKENS)))


@functools.cache
def sampling_pair():
    """A target and a draft that agree about two times in three, neither of them sure."""
    target = llama(3, vocabulary=VOCABULARY, hidden=16, layers=1, sharpness=3.0, eos=None, bos_token_id=None)
    return attached(target), noisy_copy(target, noise=1.0, seed=5)


@torch.no_grad()
def exact_distribution(model, processors=()):
    """[V ** T] the probability of every sequence, by enumeration through the model and the processors."""
    total = torch.zeros(len(SEQUENCES), dtype=torch.float64)
    text = torch.cat([PROMPT.expand(len(SEQUENCES), -1), SEQUENCES], dim=1)
    logits = model(text).logits
    for step in range(NEW_TOKENS):
        column = PROMPT.shape[1] + step
        scores = logits[:, column - 1].float()
        for processor in processors:
            scores = processor(text[:, :column], scores)
        total += scores.double().log_softmax(-1).gather(1, SEQUENCES[:, step : step + 1])[:, 0]
    return total.exp().numpy()


def draw(settings, samples=SAMPLES, seed=0, processors=(), hooks=(), books_balance=True, pair=None):
    """How often each sequence came out, [V ** T]. A deliberate mutant need not keep its books in balance."""
    model, draft = sampling_pair() if pair is None else pair
    torch.manual_seed(seed)
    counts = np.zeros(len(SEQUENCES))
    weights = VOCABULARY ** torch.arange(NEW_TOKENS - 1, -1, -1)
    ids = PROMPT.expand(ROWS, -1)
    for _ in range(samples // ROWS):
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=draft,
            do_sample=True,
            top_k=0,
            max_new_tokens=NEW_TOKENS,
            logits_processor=list(processors),
            speculation_hooks=hooks,
            specbranch=settings,
        )
        index = (out[:, PROMPT.shape[1] :].cpu() * weights).sum(1)
        counts += np.bincount(index.numpy(), minlength=len(SEQUENCES))
        if books_balance:
            assert_counts_add_up(model.specbranch_stats)
    return counts


def p_value(counts, expected):
    """The smallest of the p-values of the joint distribution and of each position's marginal."""
    shape = (VOCABULARY,) * NEW_TOKENS
    counts, expected = counts.reshape(shape), expected.reshape(shape) * counts.sum()
    tests = [(counts.ravel(), expected.ravel())]
    for position in range(NEW_TOKENS):
        others = tuple(axis for axis in range(NEW_TOKENS) if axis != position)
        tests.append((counts.sum(others), expected.sum(others)))
    return min(_chi_square(observed, wanted) for observed, wanted in tests)


def _chi_square(observed, expected):
    """Cells too rare to count by themselves are counted together."""
    common = expected >= 5
    observed = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    kept = expected > 0
    if observed[~kept].sum() > 0:
        return 0.0  # something impossible came out
    statistic = ((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    return float(chi2.sf(statistic, max(1, kept.sum() - 1)))
