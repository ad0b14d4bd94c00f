"""Length-dependent rotary embeddings: every token gets the frequencies that plain decoding gives it."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PhimoeConfig, PhimoeForCausalLM

from .models import attached, config, noisy_copy, prompt, slowly
from .releases import PHI3_FALLS_BACK

VOCABULARY, ORIGINAL = 48, 24
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
LONGROPE = dict(
    rope_type="longrope", rope_theta=100.0, short_factor=[1.0, 1.2, 1.4, 1.6], long_factor=[3.0, 5.0, 7.0, 9.0]
)
LONG = dict(max_position_embeddings=128, rope_parameters={**LONGROPE, "original_max_position_embeddings": ORIGINAL})
MODELS = {
    "llama-longrope": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **LONG)),
    "llama-dynamic": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SIZES,
            max_position_embeddings=ORIGINAL,
            rope_parameters=dict(rope_type="dynamic", rope_theta=100.0, factor=4.0),
        )
    ),
    "phi3-longrope": lambda: Phi3ForCausalLM(Phi3Config(**SIZES, **LONG, original_max_position_embeddings=ORIGINAL)),
    "phimoe-longrope": lambda: PhimoeForCausalLM(
        PhimoeConfig(
            **SIZES,
            max_position_embeddings=128,
            num_local_experts=4,
            original_max_position_embeddings=ORIGINAL,
            rope_parameters={
                **LONGROPE,
                "original_max_position_embeddings": ORIGINAL,
                "short_mscale": 1.1,
                "long_mscale": 1.6,
            },
        )  # fmt: skip
    ),
}


def make(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.ndim > 1 else 1.0)
    return model


CASES = [(name, policy) for name in MODELS for policy in ("autoregressive", "vanilla", "specbranch")]
QUICK = ("llama-dynamic", "autoregressive"), ("phi3-longrope", "vanilla")


@pytest.mark.compat
@pytest.mark.parametrize("rows", [slowly(1), 3])
@pytest.mark.parametrize(
    ("name", "policy"),
    [each if each in QUICK else slowly(*each) for each in CASES],
)
def test_crossing_the_limit_equals_plain_generate(name, rows, policy):
    target = make(name)
    draft = noisy_copy(target, noise=0.05, seed=1)
    model = attached(target)
    more = {"assistant_model": draft} if policy != "autoregressive" else {}
    for length in (7, ORIGINAL - 2, ORIGINAL + 3):  # one after the other: modules keep frequencies between calls
        inputs = prompt(rows, length=length, vocabulary=VOCABULARY, seed=length)
        arguments = dict(**inputs, max_new_tokens=max(10, ORIGINAL + 6 - length), do_sample=False)
        expected = target.generate(**arguments)
        got = model.generate(**arguments, **more, specbranch=config(policy, gamma=4, tree_leaves=3))
        assert torch.equal(got, expected), (length, got, expected)


@pytest.mark.parametrize(
    "name", [*map(slowly, ("llama-dynamic", "phi3-longrope")), "llama-longrope", "phimoe-longrope"]
)
def test_branches_cross_the_limit(name):
    target = make(name)
    arguments = dict(**prompt(2, length=15, vocabulary=VOCABULARY, seed=1), max_new_tokens=20, do_sample=False)
    got = attached(target).generate(**arguments, assistant_model=noisy_copy(target, noise=0.05, seed=1))
    assert torch.equal(got, target.generate(**arguments))


def test_the_limit_matters():
    """Shows that the tests above can fail: other frequencies after the limit give another text."""
    target = make("llama-longrope")
    other = copy.deepcopy(target)
    other.config.rope_parameters["original_max_position_embeddings"] = 1000
    inputs = prompt(1, length=7, vocabulary=VOCABULARY, seed=7)
    one, two = (model.generate(**inputs, max_new_tokens=36, do_sample=False)[0] for model in (target, other))
    assert torch.equal(one[:ORIGINAL], two[:ORIGINAL]) and not torch.equal(one, two)


def test_rows_that_end_before_the_limit():
    target = make("phi3-longrope")
    model, draft = attached(target), noisy_copy(target, noise=0.05, seed=1)
    inputs = prompt(4, length=9, vocabulary=VOCABULARY, seed=3)
    free = target.generate(**inputs, max_new_tokens=20, do_sample=False)
    for end in {int(free[0, 14]), int(free[1, ORIGINAL]), int(free[2, ORIGINAL + 1])}:
        arguments = dict(**inputs, max_new_tokens=20, do_sample=False, eos_token_id=end, pad_token_id=0)
        assert torch.equal(model.generate(**arguments, assistant_model=draft), target.generate(**arguments)), end
        assert (model.specbranch_stats is None) == PHI3_FALLS_BACK


def test_fallback_when_the_model_drops_its_cache(caplog):
    target = make("phi3-longrope")
    model, draft = attached(target), noisy_copy(target, noise=0.05, seed=1)
    inputs = prompt(2, length=9, vocabulary=VOCABULARY, seed=3)
    arguments = dict(**inputs, max_new_tokens=40, do_sample=False, return_dict_in_generate=True, output_scores=True)
    expected = target.generate(**arguments)
    for _ in range(2):
        got = model.generate(**arguments, assistant_model=draft)
        assert torch.equal(got.sequences, expected.sequences)
        assert len(got.scores) == len(expected.scores)
        assert model.specbranch_stats is None
    said = [record.message for record in caplog.records if "gives up its cache at 25 tokens" in record.message]
    assert len(said) == 1


def test_streamer_gets_each_token_once():
    class Keeps:
        def __init__(self):
            self.tokens, self.ends = [], 0

        def put(self, value):
            self.tokens.extend(value.flatten().tolist())

        def end(self):
            self.ends += 1

    target = make("phi3-longrope")
    model, draft = attached(target), noisy_copy(target, noise=0.05, seed=1)
    arguments = dict(**prompt(1, length=9, vocabulary=VOCABULARY, seed=3), max_new_tokens=40, do_sample=False)
    streamer = Keeps()
    got = model.generate(**arguments, assistant_model=draft, streamer=streamer)
    assert streamer.tokens == got[0].tolist() and streamer.ends == 1
    assert PHI3_FALLS_BACK or model.specbranch_stats.new_tokens == 40
