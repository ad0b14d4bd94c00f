"""The folded form of a head predicts what the trained form predicts, in few operations."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specbranch import load_demo_pair
from hf_specbranch.decoding.hooks import Survivor
from hf_specbranch.heads import folded

from .heads import balance, random_head, trained_form
from .models import VOCABULARY

KINDS = {
    "everything, matched": {},
    "one drafted token": {"drafted_tokens": 1},
    "more drafted tokens than positions": {"drafted_tokens": 6},
    "matched with the state alone": {"features": ("hidden", "drafted", "entropy")},
    "nothing but what is matched": {"features": ("hidden", "drafted")},
    "matched with the token alone": {"features": ("committed", "drafted", "kind")},
    "everything, unmatched": {"match_size": 0},
    "as in the paper": {"features": ("hidden", "committed"), "match_size": 0},
    "the draft's numbers": {"features": ("confidence", "probability", "entropy", "kind")},
    "no kind": {"features": ("confidence", "entropy")},
}


def random_drafts(rows, positions, hidden=32, layers=1, vocabulary=VOCABULARY, seed=0):
    """Random drafts, some of them shorter than others; none has the padding token, whose embedding is 0."""
    torch.manual_seed(seed)
    q = (3 * torch.randn(rows, positions, vocabulary)).softmax(-1)
    return Survivor(
        tokens=torch.randint(1, vocabulary, (rows, positions)),
        length=torch.randint(1, positions + 1, (rows,)),
        confidence=q.max(-1).values,
        committed=torch.randint(0, vocabulary, (rows,)),
        features=torch.randn(rows, layers, hidden),
        fresh=torch.rand(rows) < 0.5,
        scores=q,
    )


def assert_same_predictions(head, target, *, hidden=32, layers=1, vocabulary=VOCABULARY, all_kinds=True):
    hook, seen = head.bind(target), []
    for positions in (1, 3, 4, 10):
        drafts = random_drafts(200, positions, hidden, layers, vocabulary)
        _, wanted = trained_form(head, drafts, target.get_input_embeddings())
        assert torch.equal(hook.head(drafts), wanted)
        seen.append(wanted)
    assert not all_kinds or set(torch.cat(seen).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_are_those_of_the_trained_form(kind, target, draft):
    head = random_head(target, draft, **KINDS[kind])
    features, _ = trained_form(head, random_drafts(400, 4, seed=1), target.get_input_embeddings())
    assert_same_predictions(balance(head, features), target)


def test_large_vocabulary_needs_no_tables(target, draft, monkeypatch):
    monkeypatch.setattr(folded, "LARGEST_TABLE", 0)
    head = random_head(target, draft)
    assert_same_predictions(head, target, all_kinds=False)
    assert head.bind(target).head.folded.expectation.key.values is None


@pytest.mark.parametrize("name", ["good", "weak"])
def test_shipped_heads_predict_as_trained(name):
    target, _, _, head = load_demo_pair(name, head=True)
    assert_same_predictions(head, target, hidden=256, layers=4, vocabulary=4096, all_kinds=False)


@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.0, 0.0), (0.3, 0.7)])
def test_thresholds_are_compared_exactly(thresholds, target, draft):
    head = random_head(target, draft, none_threshold=thresholds[0], all_threshold=thresholds[1])
    with torch.no_grad():
        head.layers[-1].weight.mul_(100)  # probabilities of exactly 0 and 1
    assert_same_predictions(head, target, all_kinds=False)


def test_head_is_folded_again_when_its_weights_change(target, draft):
    head = random_head(target, draft)
    one, two = head.bind(target), head.bind(target)
    assert one.head.folded is two.head.folded and one.settings == two.settings
    with torch.no_grad():
        head.layers[-1].bias.add_(torch.tensor([5.0, 0.0, -5.0]))
    changed = head.bind(target)
    assert changed.settings != one.settings
    assert_same_predictions(head, target, all_kinds=False)


def test_prediction_takes_few_operations(target, draft):
    """Launching an operation takes longer than its arithmetic, so their number is what a prediction costs."""

    class Counting(TorchDispatchMode):
        VIEWS = "slice unsqueeze view _unsafe_view select t expand permute transpose detach alias".split()

        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket.__name__ not in self.VIEWS:
                self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    ask, drafts = random_head(target, draft).bind(target).head, random_drafts(1, 4)
    with Counting() as counted, torch.no_grad():
        ask(drafts)
    assert len(counted.names) <= 32, counted.names
