"""Scores, logits, hidden states, attentions and caches are those of plain `generate()`, in shape and in value."""

import pytest
import torch
import transformers as tf

from .families import make
from .models import EOS, PAD, attached, config, llama, noisy_copy, pairs, prompt, slowly
from .test_generate_features import window_model

ASKED = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}
ENDS = [EOS, 11, 17, 23, 30, 41]  # many, so that rows end at different times


def assert_alike(ours, plain):
    """Compare nested tuples of tensors."""
    if isinstance(plain, torch.Tensor):
        assert ours.shape == plain.shape and ours.dtype == plain.dtype
        torch.testing.assert_close(ours, plain, atol=2e-3, rtol=2e-3)
        return
    assert len(ours) == len(plain)
    for one, other in zip(ours, plain):
        assert_alike(one, other)


def compare(target, rows, policy="specbranch", seeds=2, prepare=lambda kwargs: kwargs, **kwargs):
    model, draft = attached(target), noisy_copy(target, noise=0.1, seed=1)
    kwargs = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": PAD, **ASKED, **kwargs}
    for seed in range(seeds):
        inputs = prompt(rows, seed=seed)
        plain = target.generate(**inputs, **prepare(kwargs))
        ours = model.generate(**inputs, **prepare(kwargs), assistant_model=draft, specbranch=config(policy))
        assert torch.equal(ours.sequences, plain.sequences)
        for name in ("scores", "logits", "hidden_states", "attentions"):
            if plain.get(name) is not None:
                assert_alike(ours[name], plain[name])
        assert ours.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()
        for mine, theirs in zip(ours.past_key_values.layers, plain.past_key_values.layers):
            if theirs.keys is not None or mine.keys is not None:  # layers that share the keys of others have none
                assert_alike((mine.keys, mine.values), (theirs.keys, theirs.values))
        normalized = {"normalize_logits": True}
        assert_alike(
            model.compute_transition_scores(ours.sequences, ours.scores, **normalized),
            target.compute_transition_scores(plain.sequences, plain.scores, **normalized),
        )
    return ours


@pytest.mark.compat
@pytest.mark.parametrize(
    ("policy", "rows"),
    [*pairs(["vanilla", "specbranch"], [1, 3]), *(slowly(each, 3) for each in ("autoregressive", "pearl"))],
)
def test_rows_go_on_with_padding_after_their_end(rows, policy):
    compare(llama(seed=0, attn_implementation="eager"), rows, policy, eos_token_id=ENDS, repetition_penalty=1.2)


@pytest.mark.compat
@pytest.mark.matrix
def test_long_padding_is_read_in_parts():
    few = {"output_hidden_states": False, "output_attentions": False}
    ours = compare(llama(seed=0), 4, "vanilla", seeds=1, eos_token_id=ENDS[:2], max_new_tokens=100, **few)
    assert (ours.sequences[:, -70:] == PAD).all(1).any()


@pytest.mark.compat
@pytest.mark.parametrize(
    ("family", "cache"),
    [*pairs(["mistral-sliding", "gpt-oss"], [None, "static"]), *(slowly("gemma3", each) for each in (None, "static"))],
)
def test_attentions_have_the_columns_of_the_cache(cache, family):
    target = make(family)
    target.set_attn_implementation("eager")
    compare(target, 2, seeds=1, cache_implementation=cache)


@pytest.mark.compat
def test_a_static_cache_gives_attentions_over_all_its_room():
    target = llama(seed=0, attn_implementation="eager")
    compare(target, 1, cache_implementation="static")
    caches = {"prepare": lambda kwargs: {**kwargs, "past_key_values": tf.StaticCache(target.config, max_cache_len=40)}}
    compare(target, 1, seeds=1, **caches)


def test_attentions_of_a_second_turn():
    target = window_model(5)
    target.set_attn_implementation("eager")
    model, draft, outputs = attached(target), noisy_copy(target, noise=0.1, seed=1), []
    for speaker, extra in ((target, {}), (model, {"assistant_model": draft, "specbranch": config()})):
        kwargs = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, **ASKED, **extra}
        first = speaker.generate(**prompt(), **kwargs)
        text = torch.cat([first.sequences, torch.tensor([[5, 6, 7]])], dim=1)
        again = {"input_ids": text, "attention_mask": torch.ones_like(text), "past_key_values": first.past_key_values}
        outputs.append(speaker.generate(**again, **kwargs))
    for name in ("hidden_states", "attentions"):
        assert_alike(outputs[1][name], outputs[0][name])


def gemma3n():
    torch.manual_seed(0)
    settings = dict(
        vocab_size=48, vocab_size_per_layer_input=48, hidden_size=32, hidden_size_per_layer_input=8,
        intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=256, sliding_window=6, num_kv_shared_layers=2, laurel_rank=4, altup_num_inputs=4,
        activation_sparsity_pattern=[0.0] * 4, layer_types=["sliding_attention", "full_attention"] * 2,
        pad_token_id=PAD, bos_token_id=1, eos_token_id=EOS,
    )  # fmt: skip
    return tf.Gemma3nForCausalLM(tf.Gemma3nTextConfig(**settings)).eval()


@pytest.mark.compat
@pytest.mark.matrix
@pytest.mark.parametrize("rows", [slowly(1), 2])
def test_hidden_states_with_several_streams(rows):
    target = gemma3n()
    target.set_attn_implementation("eager")
    compare(target, rows, seeds=1)
