"""Small models and runs that the tests share."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specbranch import SpecBranchConfig, specbranch

VOCABULARY, EOS, PAD = 48, 2, 0
POLICIES = ("autoregressive", "vanilla", "pearl", "specbranch")


def slowly(*values):
    """Return a case that only runs with the long tests."""
    return pytest.param(*values, marks=pytest.mark.slow)


def pairs(first, second):
    """Return all pairs of values as cases. The fewest that contain every value are quick, the others slow."""
    first, second = list(first), list(second)
    quick = {(n % len(first), n % len(second)) for n in range(max(len(first), len(second)))}
    cases = [(i, j) for i in range(len(first)) for j in range(len(second))]
    return [(first[i], second[j]) if (i, j) in quick else slowly(first[i], second[j]) for i, j in cases]


def llama(seed, vocabulary=VOCABULARY, hidden=32, layers=2, sharpness=4.0, eos=EOS, **changes):
    """A random Llama whose distributions are peaked enough to be interesting."""
    torch.manual_seed(seed)
    settings = dict(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=eos,
        pad_token_id=PAD,
    )
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
        model.lm_head.weight.mul_(sharpness)
    return model


def noisy_copy(model, noise, seed):
    """A draft that resembles `model` the more the less noise it gets."""
    twin = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    return twin


def attached(model):
    """A copy of the model with SpecBranch attached; the original stays plain."""
    return specbranch(copy.deepcopy(model))


def prompt(rows=1, length=7, seed=0, vocabulary=VOCABULARY):
    """Left-padded prompts, every row but the first shorter by a few tokens."""
    torch.manual_seed(seed)
    ids = torch.randint(3, vocabulary, (rows, length))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : min(row, length - 1)] = 0
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


def config(policy="specbranch", gamma=4, k=3, epsilon=0.3, **more):
    return SpecBranchConfig(policy=policy, max_draft_length=gamma, max_branches=k, confidence_threshold=epsilon, **more)


def assert_counts_add_up(stats):
    fates = stats.num_accepted_tokens + stats.rollback_tokens + stats.wasted_branch_tokens
    assert fates == stats.num_draft_tokens, stats
    assert min(stats.num_accepted_tokens, stats.rollback_tokens, stats.wasted_branch_tokens) >= 0, stats
    assert stats.branch_hits <= stats.branch_points
    assert sum(stats.acceptance_histogram) == stats.num_drafts
    accepted = sum(count * accepted for accepted, count in enumerate(stats.acceptance_histogram))
    assert accepted == stats.num_accepted_tokens
