"""What every draft source must keep: the target's own text, its distribution, and counts that add up.

A test class of a source inherits `DraftSourceTests` and says which arguments of `generate()` choose the source.
"""

import pytest
import torch

from hf_specbranch.decoding.several_sources import LookupBesideDraft

from . import sampling
from .models import assert_counts_add_up, attached, llama, noisy_copy, prompt, slowly
from .sampling import SMALLEST_P, exact_distribution, p_value, sampling_pair


def repetitive_pair():
    """A target over few tokens, so that pairs of them come again all the time, and a draft."""
    target = llama(seed=11, vocabulary=12, hidden=16, layers=2, sharpness=2.0, eos=None)
    return target, noisy_copy(target, noise=0.3, seed=1)


def draft_is_worth(tokens, monkeypatch):
    """Let a draft be worth so many accepted tokens, in a pass that takes as long as one without a draft."""

    def worth(self, speed):
        return tokens - speed * self.lookup.lookup.times.seconds(0)

    monkeypatch.setattr(LookupBesideDraft, "_draft_worth", worth)


class DraftSourceTests:
    """The contract of a draft source. `source` names it in the statistics."""

    source = ""
    new_tokens = 24

    def arguments(self, draft):
        """Return the arguments of `generate()` that choose the source."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def always_proposes(self):
        """Override it to let the source propose tokens wherever it can."""

    def generated(self, rows, target, draft, **asked):
        model = attached(target)
        asked = {**prompt(rows, length=12, vocabulary=12), "max_new_tokens": self.new_tokens, **asked}
        out = model.generate(**asked, **self.arguments(draft))
        assert_counts_add_up(model.specbranch_stats)
        return out, model.specbranch_stats, asked

    @pytest.mark.parametrize(
        ("stages", "rows"),
        [
            ("static", 3),
            *(slowly(*each) for each in (("eager", 1), ("eager", 3), ("static", 1))),
        ],
    )
    def test_greedy_text_is_that_of_plain_generate(self, stages, rows, request):
        if stages == "static":
            request.getfixturevalue("static_stages")
        target, draft = repetitive_pair()
        out, stats, asked = self.generated(rows, target, draft, do_sample=False)
        assert torch.equal(out, target.generate(**asked))
        assert stats.sources[self.source]["accepted"] > 0

    def test_rows_may_end_anywhere(self):
        target, draft = repetitive_pair()
        ends = {"eos_token_id": [3, 5], "pad_token_id": 0, "do_sample": False}
        out, _, asked = self.generated(4, target, draft, **ends)
        assert torch.equal(out, target.generate(**asked))

    @pytest.mark.parametrize(
        "processors", [slowly({}), {"repetition_penalty": 1.3}, slowly({"no_repeat_ngram_size": 4})], ids=str
    )
    def test_processors_shape_the_text_as_in_plain_generate(self, processors):
        self.compare(processors)

    @pytest.mark.slow
    def test_a_penalty_shapes_the_text_of_static_stages_too(self, static_stages):
        assert not self.compare({"repetition_penalty": 1.3}).slowed_by

    def compare(self, processors):
        """Generate a padded batch with these processors and compare; return the statistics."""
        target, draft = repetitive_pair()
        out, stats, asked = self.generated(2, target, draft, do_sample=False, **processors)
        assert torch.equal(out, target.generate(**asked))
        return stats

    def test_sampled_text_has_the_targets_distribution(self):
        assert self.sampling_p_value() > SMALLEST_P

    def sampling_p_value(self, samples=sampling.QUICK_SAMPLES):
        model, draft = sampling_pair()
        counts = draw_with(model, self.arguments(draft), samples)
        assert model.specbranch_stats.sources[self.source]["drafted"] > 0
        return p_value(counts, exact_distribution(model))

    def test_the_same_seed_gives_the_same_text(self):
        target, draft = repetitive_pair()
        texts = []
        for _ in range(2):
            torch.manual_seed(5)
            texts.append(self.generated(2, target, draft, do_sample=True, top_k=0)[0])
        assert torch.equal(*texts)


def draw_with(model, arguments, samples, rows=sampling.ROWS):
    """How often each sequence came out, [V ** T]."""
    torch.manual_seed(0)
    ids = torch.tensor([[1, 2, 1, 2, 3, 1, 2, 1]], device=model.device).expand(rows, -1)[:, -sampling.PROMPT.shape[1] :]
    weights = sampling.VOCABULARY ** torch.arange(sampling.NEW_TOKENS - 1, -1, -1)
    counts = torch.zeros(len(sampling.SEQUENCES))
    for _ in range(samples // rows):
        asked = {"do_sample": True, "top_k": 0, "max_new_tokens": sampling.NEW_TOKENS, **arguments}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **asked)
        counts += torch.bincount((out[:, ids.shape[1] :].cpu() * weights).sum(1), minlength=len(counts))
    return counts.numpy()
