"""The mask probe accepts rounding and finds every planted fault."""

import copy

import pytest
import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from hf_specbranch.bench.random_model import random_model
from hf_specbranch.bench.shapes import config_of
from hf_specbranch.runtime.mask_probe import mask_maker_for

from .models import attached, llama, noisy_copy, pairs, prompt, slowly

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REFUSED = "does not compute the same logits under an explicit attention mask"


def deep(dtype, layers=12):
    return llama(seed=0, vocabulary=500, hidden=64, layers=layers, sharpness=1.0).to(dtype)


@pytest.mark.compat
@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [slowly(torch.float32), torch.bfloat16, slowly(torch.float16)])
def test_rounding_is_accepted(dtype):
    """In bfloat16, logits of two ordinary runs may differ by more than a tenth of their standard deviation."""
    model = llama(seed=0, vocabulary=4000, hidden=48, layers=32, sharpness=1.0)
    for parameter in model.model.layers.parameters():
        parameter.data.mul_(4.0 if parameter.ndim == 2 else 1.0)
    mask_maker_for(model.to(dtype), "target")


class IgnoresMasks(LlamaForCausalLM):
    """Attends to the whole cache, in passes over one token or in passes over several."""

    blind_alone = None

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, **kwargs):
        if past_key_values is not None and attention_mask is not None:
            if self.blind_alone is not None and (input_ids.shape[1] == 1) == self.blind_alone:
                attention_mask = attention_mask.clone().fill_(True)
        return super().forward(input_ids, attention_mask, past_key_values=past_key_values, **kwargs)


@pytest.mark.parametrize("blind_alone", [True, False])
def test_mask_ignored_in_one_kind_of_pass(blind_alone):
    model = llama(seed=0, num_hidden_layers=1)  # with more layers the fault would show in later passes too
    model.__class__ = IgnoresMasks
    mask_maker_for(model, "target")
    another = copy.deepcopy(model)
    another.blind_alone = blind_alone
    with pytest.raises(ValueError, match=f"{REFUSED}.*depends on tokens that the mask hides"):
        mask_maker_for(another, "target")


def change_masks(attention, change):
    """Make one attention module change the masks that it is given."""
    forward = attention.forward

    def changed(hidden_states, position_embeddings, attention_mask, **kwargs):
        if attention_mask is not None:
            attention_mask = change(attention_mask)
        return forward(hidden_states, position_embeddings, attention_mask, **kwargs)

    attention.forward = changed


def sees_all(mask):
    return torch.ones_like(mask)


def obeys_first_slots_only(mask):
    mask = mask.clone()
    mask[..., 40:] = True
    return mask


@pytest.mark.parametrize(("dtype", "change"), pairs(DTYPES, [sees_all, obeys_first_slots_only]))
def test_one_layer_that_sees_too_much(change, dtype):
    model = deep(dtype)
    change_masks(model.model.layers[9].self_attn, change)
    with pytest.raises(ValueError, match=f"{REFUSED}.*depends on tokens that the mask hides"):
        mask_maker_for(model, "target")


@pytest.mark.parametrize("dtype", [torch.float32, slowly(torch.bfloat16), torch.float16])
def test_one_layer_with_a_window_by_index(dtype):
    model = deep(dtype)

    def within_window(mask):
        slots = torch.arange(mask.shape[-1])
        return mask & (slots > mask.shape[-1] - 256)

    change_masks(model.model.layers[5].self_attn, within_window)
    with pytest.raises(ValueError, match=f"{REFUSED}.*layers 5 do not see a token that the mask shows"):
        mask_maker_for(model, "target")


def test_window_longer_than_the_default_probe():
    model = llama(seed=0)
    model.config.local_window = 1000

    def within_window(mask):
        return mask & (torch.arange(mask.shape[-1]) > mask.shape[-1] - 1000)

    change_masks(model.model.layers[1].self_attn, within_window)
    with pytest.raises(ValueError, match="layers 1 do not see a token that the mask shows"):
        mask_maker_for(model, "target")


class CountsPositions(LlamaForCausalLM):
    """Takes positions from the length of the cache and ignores `position_ids`."""

    def forward(self, input_ids=None, position_ids=None, past_key_values=None, **kwargs):
        start = 0 if past_key_values is None else past_key_values.get_seq_length()
        position_ids = start + torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids, position_ids=position_ids, past_key_values=past_key_values, **kwargs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_by_index(dtype):
    model = llama(seed=0, hidden=128).to(dtype)
    model.__class__ = CountsPositions
    with pytest.raises(ValueError, match=f"{REFUSED}.*times as much as two ordinary runs"):
        mask_maker_for(model, "target")


def test_cache_that_changes_the_logits():
    model = llama(seed=0)
    forward = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: forward(x, position_ids - position_ids.min())
    with pytest.raises(ValueError, match=REFUSED):
        mask_maker_for(model, "target")


def test_layers_without_effect_are_accepted():
    """Their queries depend on no slot at all."""
    model = llama(seed=0)
    model.model.layers[0].self_attn.o_proj.weight.data.zero_()
    mask_maker_for(model, "target")


@pytest.mark.compat
def test_gpt_neo_is_refused():
    """Its local attention goes by index, so a window of 256 slots is wrong when rows roll back differently."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=48, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]])
    model = GPTNeoForCausalLM(GPTNeoConfig(**sizes, window_size=256, max_position_embeddings=1024)).eval()
    with pytest.raises(ValueError, match="layers 1 do not see a token that the mask shows"):
        mask_maker_for(model, "target")


def test_non_finite_weights_are_reported():
    model = llama(seed=0)
    model.model.layers[1].mlp.down_proj.weight.data[3, 3] = float("nan")
    with pytest.raises(ValueError, match=r"the draft LlamaForCausalLM computes logits that are not finite.*weights"):
        mask_maker_for(model, "draft")


def test_failing_model_is_reported():
    model = llama(seed=0)
    model.model.layers[1].mlp.down_proj = torch.nn.Linear(3, 32)
    with pytest.raises(ValueError, match=r"fails on an ordinary pass.*RuntimeError: mat1 and mat2.*check its config"):
        mask_maker_for(model, "target")


def test_model_that_fails_with_a_cache_is_reported():
    model = llama(seed=0)
    model.model.layers[1].self_attn.layer_idx = None
    with pytest.raises(ValueError, match=r"a cache that is addressed by slot \(TypeError: .*check its config"):
        mask_maker_for(model, "target")


@pytest.mark.compat
def test_router_losses_are_switched_off():
    torch.manual_seed(0)
    sizes = dict(vocab_size=48, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    settings = MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4, output_router_logits=True)
    target = MixtralForCausalLM(settings).eval()
    inputs = prompt(1)
    target.config.output_router_logits = False  # with it, plain generate fails in some releases
    expected = target.generate(**inputs, max_new_tokens=12, do_sample=False)
    target.config.output_router_logits = True
    draft = noisy_copy(target, noise=0.1, seed=1)
    got = attached(target).generate(**inputs, max_new_tokens=12, do_sample=False, assistant_model=draft)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["gpt-oss-20b", *map(slowly, ("qwen3-30b-a3b", "mixtral-8x7b"))])
def test_tokens_that_move_to_other_experts_do_not_refuse_a_mixture(name):
    """One query's rounding depends on which experts other queries choose; the pass that checks its keys must not."""
    for seed in range(5):
        mask_maker_for(random_model(config_of(name, tiny=True), "cpu", torch.float32, seed), "target")
