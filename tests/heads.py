"""Heads for the small test models."""

import torch

from hf_specbranch import LengthHead, LengthHeadConfig
from hf_specbranch.heads.config import FEATURES
from hf_specbranch.heads.identity import ModelIdentity, tokenizer_hash

from .tokens import letter_tokenizer


def random_head(target, draft, seed=0, gamma=4, **changes):
    """A head with random weights, whose verdicts depend on everything it reads."""
    settings = dict(
        target=ModelIdentity.of(target),
        draft=ModelIdentity.of(draft),
        gamma=gamma,
        features=FEATURES,
        num_layers=1,
        drafted_tokens=2,
        match_size=4,
        layer_sizes=(16, 8),
        none_threshold=0.35,
        all_threshold=0.35,
        tokenizer_hash=tokenizer_hash(letter_tokenizer(48)),
    )
    torch.manual_seed(seed)
    head = LengthHead(LengthHeadConfig(**{**settings, **changes})).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(3.0)
    return head


@torch.no_grad()
def balance(head, features):
    """Make all three verdicts common on lines like these, features [N, F] as the head was shown them."""
    std = features.std(0)
    head.mean.copy_(features.mean(0))
    head.std.copy_(torch.where(std > 1e-4, std, torch.ones_like(std)))
    head.layers[-1].bias.sub_(head(features).mean(0))
    return head
