"""Heads for the small test models."""

import torch

from hf_specbranch import LengthHead, LengthHeadConfig
from hf_specbranch.heads.config import FEATURES, ModelIdentity, tokenizer_hash
from hf_specbranch.heads.network import head_inputs

from .tokens import letter_tokenizer


def random_head(target, draft, seed=0, gamma=4, **changes):
    """A head with random weights, whose predictions depend on everything it reads."""
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


def trained_form(head, drafts, embeddings):
    """Return [N, F], what a head reads of drafts, and [N], its predictions in the trained form."""
    config = head.config
    features = head_inputs(drafts, embeddings, config.gamma, config.drafted_tokens, config.features).matrix(config)
    with torch.no_grad():
        return features, head.predict(features)


class Observed:
    """A head in its trained form, as a hook that records its inputs and its predictions."""

    fresh_drafts = True

    def __init__(self, head, target):
        self.head, self.embeddings = head, target.get_input_embeddings()
        self.feature_layers, self.draft_scores = head.config.feature_layers, head.config.reads_scores
        self.shown, self.predicted = [], []

    def __call__(self, drafts):
        if drafts.features is None and self.feature_layers:
            return torch.ones_like(drafts.length)
        features, prediction = trained_form(self.head, drafts, self.embeddings)
        self.shown.append(features)
        self.predicted.append(prediction)
        return prediction


@torch.no_grad()
def balance(head, features):
    """Make all three classes common on drafts like these, given their features [N, F]."""
    std = features.std(0)
    head.mean.copy_(features.mean(0))
    head.std.copy_(torch.where(std > 1e-4, std, torch.ones_like(std)))
    head.layers[-1].bias.sub_(head(features).mean(0))
    return head
