"""Models with a learned table of positions: drafts may reach beyond its end, texts may not."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM, StoppingCriteria

from hf_specbranch import SpecBranchConfig
from hf_specbranch.planning.agreement import read_agreement
from hf_specbranch.runtime.positions import learned_positions

from .families import make
from .models import EOS, PAD, VOCABULARY, attached, config, llama, noisy_copy, pairs, slowly

LEARNED = 40
SPECIAL = {"eos_token_id": EOS, "bos_token_id": 1, "pad_token_id": PAD}


def gpt2():
    settings = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=LEARNED, **SPECIAL)
    return GPT2LMHeadModel(settings)


def opt():
    settings = OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LEARNED, word_embed_proj_dim=32, **SPECIAL,
    )  # fmt: skip
    return OPTForCausalLM(settings)


@pytest.fixture(params=[gpt2, opt], scope="module")
def target(request):
    torch.manual_seed(0)
    model = request.param()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)  # varied texts
    return model.eval()


@pytest.fixture
def stages(request):
    if request.param == "static":
        request.getfixturevalue("static_stages")


in_both_stages = pytest.mark.parametrize(("target", "stages"), pairs([gpt2, opt], ["eager", "static"]), indirect=True)


def run(length, more, rows=1, padding=0):
    torch.manual_seed(length)
    ids = torch.randint(3, VOCABULARY, (rows, length))
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask, "max_new_tokens": more, "do_sample": False}


class EndsAt(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@in_both_stages
@pytest.mark.parametrize("policy", ["specbranch", *map(slowly, ("autoregressive", "vanilla", "pearl"))])
@pytest.mark.parametrize(("rows", "padding"), [(1, 0), slowly(2, 5)])
def test_text_may_end_at_the_last_position(rows, padding, policy, target, stages):
    """Plain `generate()` returns one token after the last position; a text that ends there may be given more room."""
    draft, settings = noisy_copy(target, noise=0.05, seed=1), config(policy, gamma=6, epsilon=0.0)
    for length in (LEARNED + padding + 1, LEARNED + padding - 2):
        kwargs = run(24, 90, rows, padding) | {"eos_token_id": None, "stopping_criteria": [EndsAt(length)]}
        plain = target.generate(**kwargs)
        assert plain.shape == (rows, length)
        assert torch.equal(attached(target).generate(**kwargs, assistant_model=draft, specbranch=settings), plain)


@in_both_stages
@pytest.mark.parametrize("policy", ["specbranch", *map(slowly, ("autoregressive", "vanilla", "pearl"))])
def test_longer_text_is_refused(policy, target, stages):
    kwargs = run(24, 90) | {"eos_token_id": None}
    with pytest.raises(IndexError):
        target.generate(**kwargs)
    draft, settings = noisy_copy(target, noise=0.05, seed=1), config(policy, gamma=6, epsilon=0.0)
    with pytest.raises(ValueError, match=rf"outgrown the {LEARNED} positions that {type(target).__name__} has learned"):
        attached(target).generate(**kwargs, assistant_model=draft, specbranch=settings)


@in_both_stages
@pytest.mark.parametrize("do_sample", [False, slowly(True)])
def test_auto_policy_when_the_text_outgrows_the_draft(do_sample, target, stages):
    """The planner lets the draft read the end of the text, as much as its positions allow."""
    large, draft = llama(seed=0), target
    kwargs = run(24, 100) | {"eos_token_id": None, "do_sample": do_sample}
    ours = attached(large).generate(**kwargs, assistant_model=draft, specbranch=SpecBranchConfig(policy="auto"))
    assert ours.shape == (1, 124)
    assert do_sample or torch.equal(ours, large.generate(**kwargs))


def test_agreement_reads_the_end_of_a_long_text(target):
    text = torch.randint(3, VOCABULARY, (1, 3 * LEARNED))
    agreement = read_agreement(target, text, prompt_length=2 * LEARNED)
    expected = target(text[:, -LEARNED:]).logits[0, :-1].softmax(-1).amax(-1)
    torch.testing.assert_close(torch.tensor(agreement.confidence), expected)


def test_rotary_models_have_no_learned_positions():
    assert [learned_positions(make(family)) for family in ("llama", "gemma3", "gpt-neox", "falcon")] == [None] * 4
