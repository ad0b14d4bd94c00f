"""Heads of tiny targets: made, trained for a moment, and run by themselves as a reference."""

import functools

import torch
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.modeling_layers import MtpModel

from hf_specbranch.target_heads.eagle3 import Eagle3Draft, Eagle3Settings, layer_config
from hf_specbranch.target_heads.loading import block_draft, eagle3_from
from hf_specbranch.target_heads.mtp import MtpHead

from .models import llama


def eagle3_config(target, tokens=None, layers=(0, 1), **more):
    """A config.json as the speculators project writes it, for a draft that scores the first `tokens` but one."""
    ours = target.config
    vocabulary = ours.vocab_size
    decoder = {
        "model_type": "llama", "vocab_size": vocabulary, "hidden_size": ours.hidden_size, "num_hidden_layers": 1,
        "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": vocabulary if tokens is None else tokens,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 3}]},
        "transformer_layer_config": {**decoder, **more.pop("decoder", {})},
        **more,
    }


def random_weights(config, target, seed=0):
    """Weights as they are published: the embeddings are the target's, d2t says how far each token is moved."""
    torch.manual_seed(seed)
    settings = Eagle3Settings.from_dict(config, target.config.num_hidden_layers)
    head = Eagle3Draft(layer_config(config["transformer_layer_config"]), settings)
    weights = {name: value.clone() for name, value in head.state_dict().items() if name != "embed_tokens.weight"}
    if settings.draft_vocab_size != target.config.vocab_size:  # leave out token 0
        weights["d2t"] = torch.ones(settings.draft_vocab_size, dtype=torch.long)
        weights["t2d"] = torch.arange(target.config.vocab_size) % (settings.draft_vocab_size + 1) > 0
    return weights


def random_eagle3(target, seed=0, **settings):
    config = eagle3_config(target, **settings)
    return eagle3_from(target, config, random_weights(config, target, seed))


@torch.no_grad()
def states_of(head, target, text):
    """[B, L - 1, S]: what the tokens of a text [B, L] from the second on are read with."""
    hidden = target(text[:, :-1], output_hidden_states=True).hidden_states
    return head.encode(torch.cat([hidden[layer] for layer in head.state_layers], dim=-1))


@torch.no_grad()
def reference_draft(head, target, text, count):
    """The likeliest tokens after a text, list of tokens: the head reads it in one pass, then its own states."""
    ids = torch.tensor([text])
    states, drafted = states_of(head, target, ids), []
    tokens = ids[:, 1:]
    for _ in range(count):
        out = head(tokens, states=states)
        best = out.logits[0, -1].argmax()
        drafted.append(int(best if head.token_ids is None else head.token_ids[best]))
        states = torch.cat([states, out.hidden_states[0][:, -1:]], dim=1)
        tokens = torch.cat([tokens, torch.tensor([[drafted[-1]]])], dim=1)
    return drafted


def trained(head, target, texts, steps=30, depth=2):
    """Train a head on texts [B, L] of its target: to say the next token, also from its own states."""
    shared = {id(each) for each in target.parameters()}
    weights = [each.requires_grad_(True) for each in head.parameters() if id(each) not in shared]
    optimiser = torch.optim.Adam(weights, 0.02)
    own = torch.full((target.config.vocab_size,), -100)
    ids = torch.arange(len(own)) if head.token_ids is None else head.token_ids
    own[ids] = torch.arange(len(ids))
    with torch.no_grad():
        hidden = target(texts[:, :-1], output_hidden_states=True).hidden_states
    hidden = torch.cat([hidden[layer] for layer in head.state_layers], dim=-1)
    for _ in range(steps):
        states, loss = head.encode(hidden), 0.0
        for shift in range(depth):
            out = head(texts[:, 1 + shift : -1], states=states[:, : texts.shape[1] - 2 - shift])
            loss = loss + torch.nn.functional.cross_entropy(
                out.logits.flatten(0, 1), own[texts[:, 2 + shift :]].flatten()
            )
            states = out.hidden_states[0]
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return head


def small_target():
    """A target over few tokens with a multi-token-prediction layer, and texts of it."""
    target = llama(seed=11, vocabulary=12, hidden=16, layers=2, sharpness=2.0, eos=None, num_mtp_layers=1)
    torch.manual_seed(0)
    prompts = torch.randint(3, 12, (16, 12))
    asked = dict(attention_mask=torch.ones_like(prompts), max_new_tokens=40, do_sample=False)
    return target, target.generate(prompts, **asked)


@functools.cache
def target_and_eagle3():
    """A target and an EAGLE-3 draft that often agrees with it."""
    target, texts = small_target()
    return target, trained(random_eagle3(target, tokens=11), target, texts)


@functools.cache
def target_and_mtp():
    """A target and a multi-token-prediction layer that often agrees with it."""
    target, texts = small_target()
    return target, trained(random_mtp(target), target, texts)


def random_block_draft(target, seed=0, block=4, **changes):
    """A DFlash draft as transformers loads it."""
    torch.manual_seed(seed)
    settings = dict(
        hidden_size=target.config.hidden_size, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, sliding_window=128, layer_types=["sliding_attention", "full_attention"],
        block_size=block, mask_token_id=0, target_layer_ids=[0], max_position_embeddings=256, pad_token_id=None,
    )  # fmt: skip
    return MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**{**settings, **changes})).eval()


@torch.no_grad()
def reference_block(head, target, text, count):
    """The likeliest tokens of the block after a text, by the draft's own forward."""
    ids, draft = torch.tensor([text]), head.draft
    hidden = target(ids[:, :-1], output_hidden_states=True).hidden_states
    context = torch.cat([hidden[layer + 1] for layer in draft.config.target_layer_ids], dim=-1)
    noise = torch.full((1, head.block), draft.config.mask_token_id)
    noise[0, 0] = text[-1]
    positions = torch.arange(len(text) - 1 + head.block)[None]
    out = draft(target.get_input_embeddings()(noise), context, position_ids=positions).last_hidden_state
    return target.lm_head(out[0, 1 : 1 + count]).argmax(-1).tolist()


@functools.cache
def target_and_block_draft():
    """A target and a DFlash draft that often agrees with it."""
    target, texts = small_target()
    head = block_draft(target, random_block_draft(target))
    shared = {id(each) for each in target.parameters()}
    optimiser = torch.optim.Adam([each for each in head.parameters() if id(each) not in shared], 0.02)
    with torch.no_grad():
        hidden = target(texts, output_hidden_states=True).hidden_states[1]
    for step in range(50):
        at = 13 + step % 30
        tokens = torch.cat([texts[:, at - 1 : at], torch.zeros(len(texts), 3, dtype=torch.long)], dim=1)
        seen = torch.ones(1, 1, 4, at + 3, dtype=torch.bool)
        positions = torch.arange(at + 3)[None]
        logits = head(
            tokens, states=head.encode(hidden[:, : at - 1]), attention_mask=seen, position_ids=positions
        ).logits
        loss = torch.nn.functional.cross_entropy(logits[:, 1:].flatten(0, 1), texts[:, at : at + 3].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return target, head


def random_mtp(target, seed=0):
    torch.manual_seed(seed)
    return MtpHead(target, MtpModel(target, 1)).eval()
