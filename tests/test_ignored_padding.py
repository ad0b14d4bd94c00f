"""From transformers 5.23 on a repetition penalty ignores the padding of each row; before, it does not. So do we."""

import copy
import inspect

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from hf_specbranch.decoding.scoring import ExactScorer, Prefixes, StaticScorer, has_static_form, signature
from hf_specbranch.runtime.static_buffers import Buffers

from . import sampling
from .graphs import Comparison
from .models import POLICIES, attached, config, pairs, prompt, slowly
from .sampling import SMALLEST_P, exact_distribution, p_value, sampling_pair
from .sources import repetitive_pair
from .test_candidates import Recorded

IGNORES_PADDING = "Tensor" in str(inspect.signature(RepetitionPenaltyLogitsProcessor))
of_release = pytest.mark.skipif(not IGNORES_PADDING, reason="a penalty takes no tensor in this release")
CPU = torch.device("cpu")
PENALTY = {"repetition_penalty": 1.5, "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}


def padded_with(token, rows=3, **more):
    """Return prompts, every row but the first padded with this token."""
    inputs = prompt(rows, length=9, **more)
    return {**inputs, "input_ids": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, token)}


@pytest.fixture(scope="module")
def inputs(target):
    """Prompts whose padding is a token that their texts contain."""
    new = target.generate(**prompt(3, length=9), **PENALTY)[1:, 9:]
    return padded_with(int(new.flatten().mode().values))


@pytest.fixture
def stages(request):
    if request.param == "static":
        request.getfixturevalue("static_stages")
    return request.param


@pytest.mark.compat
@pytest.mark.parametrize(("policy", "stages"), pairs(POLICIES, ["eager", "static"]), indirect=["stages"])
def test_text_is_that_of_plain_generate(policy, stages, inputs, target, draft):
    model, settings = attached(target), config(policy, gamma=3, max_rejection_branches=3, tree_leaves=2)
    out = model.generate(**inputs, **PENALTY, assistant_model=draft, specbranch=settings)
    assert stages == "eager" or not model.specbranch_stats.slowed_by
    assert torch.equal(out, target.generate(**inputs, **PENALTY))


def test_prompts_tell_whether_padding_is_ignored(inputs, target):
    """Otherwise the test above could not fail."""
    counting = [RepetitionPenaltyLogitsProcessor(PENALTY["repetition_penalty"])]
    out = target.generate(**inputs, **{**PENALTY, "repetition_penalty": 1.0}, logits_processor=counting)
    assert torch.equal(out, target.generate(**inputs, **PENALTY)) != IGNORES_PADDING


class Own(TemperatureLogitsWarper):
    """A user's processor: all of them are called in order, with the text of all rows."""


def test_text_with_a_users_processor_is_that_of_plain_generate(inputs, target, draft):
    more = {**PENALTY, "logits_processor": [Own(0.7)]}
    out = attached(target).generate(**inputs, **more, assistant_model=draft, specbranch=config())
    assert torch.equal(out, target.generate(**inputs, **more))


@of_release
@pytest.mark.parametrize(
    ("kind", "drafting"), [("static", "sample"), slowly("eager", "sample"), slowly("eager", "greedy")]
)
def test_sampled_text_has_the_distribution_of_unpadded_prompts(kind, drafting, request):
    """The padding is a token that is not in the prompt."""
    if kind == "static":
        request.getfixturevalue("static_stages")
    model, draft = sampling_pair()
    ids = torch.cat([torch.full((1, 2), 3), sampling.PROMPT], dim=1).expand(sampling.ROWS, -1)
    settings = config("specbranch", gamma=2, k=3, epsilon=0.5, draft_sampling=drafting)
    weights = sampling.VOCABULARY ** torch.arange(sampling.NEW_TOKENS - 1, -1, -1)
    counts = np.zeros(len(sampling.SEQUENCES))
    torch.manual_seed(0)
    for _ in range(sampling.FEWEST_SAMPLES // sampling.ROWS):
        out = model.generate(
            ids, attention_mask=torch.tensor([[0, 0, 1, 1, 1]]).expand_as(ids), assistant_model=draft, do_sample=True,
            top_k=0, repetition_penalty=1.4, max_new_tokens=sampling.NEW_TOKENS, specbranch=settings,
        )  # fmt: skip
        counts += np.bincount((out[:, ids.shape[1] :] * weights).sum(1).numpy(), minlength=len(counts))
    assert p_value(counts, exact_distribution(model, [RepetitionPenaltyLogitsProcessor(1.4)])) > SMALLEST_P


def test_warm_calls_capture_nothing_whatever_their_padding(graph_runners, target, draft):
    """The columns to ignore are no part of what captured stages depend on."""
    compare = Comparison(copy.deepcopy(target), draft, 12, policy="vanilla")
    inputs = prompt(3, length=9)
    captured = []
    for padded in (inputs["attention_mask"], inputs["attention_mask"].flip(0), torch.ones_like(inputs["input_ids"])):
        compare(inputs["input_ids"], attention_mask=padded, repetition_penalty=1.5)
        captured.append(compare.stats.graphs_captured)
    assert captured[0] and captured[1:] == [0, 0]


def test_generators_hear_the_same_scores_in_static_stages(request):
    """Processors see the padding, and generators do not."""
    target, draft = repetitive_pair()
    heard = []
    asked = {**padded_with(5, vocabulary=12), **PENALTY, "min_length": 14, "eos_token_id": 3}
    for kind in ("eager", "static"):
        if kind == "static":
            request.getfixturevalue("static_stages")
        generator = Recorded(draft)
        out = attached(target).generate(**asked, assistant_model=generator)
        assert torch.equal(out, target.generate(**asked))
        heard.append(generator.updates)
    assert len(heard[0]) == len(heard[1]) > 3
    for (ids, scores, matches), (static_ids, static_scores, static_matches) in zip(*heard):
        assert torch.equal(ids, static_ids) and matches == static_matches
        torch.testing.assert_close(static_scores, scores)


# ---- scorers


def random_prefixes(rows, positions):
    torch.manual_seed(0)
    ids = torch.randint(0, 12, (rows, 1, 9)).expand(-1, positions, -1)
    lengths = torch.tensor([[4], [2], [5]])[:rows] + torch.arange(positions)
    return 3 * torch.randn((rows, positions, 12)), Prefixes(ids, lengths)


@of_release
def test_each_row_ignores_its_own_columns():
    """As many as it is told: none, all of its text at first, or a part."""
    ignored = torch.tensor([0, 3, 2])
    logits, prefixes = random_prefixes(3, 4)
    processor = RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=ignored)
    exact = ExactScorer([processor], CPU)(logits, lambda: prefixes)
    static = StaticScorer([processor], Buffers(CPU, static_shapes=True), "test", 3, 12)(logits, lambda: prefixes)
    assert has_static_form(processor) and torch.equal(processor.prompt_ignore_length, ignored)
    for b, j in np.ndindex(3, 4):
        text = prefixes.ids[b : b + 1, j, ignored[b] : prefixes.length[b, j]]
        expected = RepetitionPenaltyLogitsProcessor(1.5)(text, logits[b, j : j + 1].clone())[0]
        assert torch.equal(exact[b, j], expected) and torch.equal(static[b, j], expected)


@of_release
def test_columns_to_ignore_are_no_setting_of_a_stage():
    given = [RepetitionPenaltyLogitsProcessor(1.5, each) for each in (torch.tensor([0, 3]), torch.tensor([1]), None, 0)]
    assert len(set(map(signature, given))) == 1
    assert signature(RepetitionPenaltyLogitsProcessor(1.4)) != signature(given[0])
