"""Models with recurrent layers are rolled back exactly, as targets and as drafts."""

import copy
import functools
import logging

import pytest
import torch
from transformers import DynamicCache

from hf_specbranch import specbranch
from hf_specbranch.families.tiny import language_models, noisy_copy, tiny_config, tiny_model
from hf_specbranch.runtime.eager import EagerRunner
from hf_specbranch.runtime.mask_probe import mask_maker_for
from hf_specbranch.runtime.recurrent_cache import RecurrentLayer
from hf_specbranch.runtime.recurrent_modules import owners_of

from .fuzz import RECURRENT
from .models import config, llama, prompt, slowly
from .sampling import (
    FEWER_SAMPLES,
    FEWEST_SAMPLES,
    QUICK_SAMPLES,
    SMALLEST_P,
    VOCABULARY,
    draw,
    exact_distribution,
    p_value,
)

# One model for each kind of layer: gated delta rule, Mamba-2 with and without attention, Mamba, convolution alone.
KINDS = ("qwen3_next", "falcon_h1", "mamba2", "mamba", "lfm2")
ENDS = list(range(3, 7))


def family(name):
    return next(each for each in language_models() if each.name == name)


@functools.cache
def plain_model(name):
    return family(name).build()


def attached_pair(name, noise=0.04, dtype=torch.float32):
    """(plain target, attached target, draft)"""
    plain = copy.deepcopy(plain_model(name)).to(dtype)
    if dtype is torch.float64:  # torch's grouped products take no doubles
        plain.set_experts_implementation("eager")
    return plain, specbranch(copy.deepcopy(plain)), noisy_copy(plain, noise)


def assert_equal(plain, model, draft, settings, rows=3, **more):
    arguments = {**prompt(rows, length=7, vocabulary=40), "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    arguments |= more
    arguments |= {name: arguments[name].to(plain.device) for name in ("input_ids", "attention_mask")}
    expected = plain.generate(**arguments)
    assert torch.equal(model.generate(**arguments, assistant_model=draft, specbranch=settings), expected)
    assert model.specbranch_stats is not None  # it did not fall back


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.compat) for name in KINDS if name != "mamba2"),
        pytest.param("mamba2", marks=[pytest.mark.compat, pytest.mark.slow]),  # falcon_h1 has its layers, too
        *(slowly(name) for name in RECURRENT if name not in KINDS),
    ],
)
def test_padded_batches_with_early_ends_equal_plain_generate(name):
    plain, model, draft = attached_pair(name)
    assert_equal(plain, model, draft, config("vanilla", gamma=4, epsilon=0.0), eos_token_id=ENDS)
    assert model.specbranch_stats.rollback_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", RECURRENT)
def test_every_policy_equals_plain_generate(name, dtype):
    plain, model, draft = attached_pair(name, dtype=dtype)
    for policy in ("auto", "autoregressive", "vanilla", "pearl", "specbranch"):
        for gamma in (1, 3, 6):
            for rows in (1, 3):
                assert_equal(plain, model, draft, config(policy, gamma=gamma, epsilon=0.05, tree_leaves=3), rows=rows)


def test_attention_draft_may_branch_for_a_recurrent_target():
    plain, model, _ = attached_pair("qwen3_next")
    draft = llama(0, vocabulary=64)
    settings = config("specbranch", gamma=3, epsilon=0.5, max_rejection_branches=2)
    assert_equal(plain, model, draft, settings, eos_token_id=ENDS)
    assert model.specbranch_stats.wasted_branch_tokens > 0


@pytest.mark.parametrize("policy", [*map(slowly, ("vanilla", "pearl")), "specbranch"])
def test_recurrent_draft_of_an_attention_target(policy):
    plain = llama(0, vocabulary=64)
    assert_equal(plain, specbranch(copy.deepcopy(plain)), plain_model("mamba2"), config(policy, epsilon=0.1), rows=2)


@pytest.mark.parametrize("policy", ["vanilla", "specbranch"])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_recurrent_draft_of_a_prompt_without_tokens(captured, policy, request):
    """The draft begins with the first new token, in states that know nothing of an earlier text."""
    if captured:
        request.getfixturevalue("graph_runners")
    plain, model, draft = attached_pair("lfm2")
    inputs = prompt(rows=2, length=7, vocabulary=40)
    asked = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    asked |= {"attention_mask": inputs["attention_mask"]}
    asked |= {"inputs_embeds": plain.get_input_embeddings()(inputs["input_ids"]).detach()}
    accepted = []
    for _ in range(2):
        out = model.generate(**asked, assistant_model=draft, specbranch=config(policy, epsilon=0.0))
        assert torch.equal(out, plain.generate(**asked))
        accepted.append(model.specbranch_stats.num_accepted_tokens)
        assert_equal(plain, model, draft, config(policy, epsilon=0.0), rows=2)
    assert accepted[0] == accepted[1] > 0


def test_plans_change_in_mid_text():
    """The planner lets the drafter read the text again."""
    plain, model, draft = attached_pair("mamba", noise=0.02)
    assert_equal(plain, model, draft, config("auto", epsilon="auto"), rows=1, max_new_tokens=150)


@pytest.mark.parametrize("name", [slowly(name) if name == "falcon_h1" else name for name in KINDS])
def test_rollback_to_every_position(name):
    """Each row of a batch is rolled back to another position of the same draft."""
    model = plain_model(name)
    runner, rows, context = EagerRunner(model, mask_maker_for(model, "target")), 5, 6
    texts = torch.randint(3, 40, (2, context + rows + 4), generator=torch.Generator().manual_seed(0))
    order = torch.arange(context + rows + 4).expand(rows, -1)

    def read(tokens, columns):
        visible = torch.arange(context + rows + 4) <= columns[:, :, None]
        return runner.forward(tokens, columns, columns, visible).logits

    with torch.no_grad():
        runner.reserve(rows, order.shape[1])
        runner.prefill(texts[:1, :context].expand(rows, -1), order[:, :context], None)
        read(texts[:1, context : context + rows].expand(rows, -1), order[:, context : context + rows])
        kept = torch.arange(rows)[:, None] + 1  # draft tokens that stay
        columns = context + kept + torch.arange(3)
        logits = read(texts[1].take(columns), columns)
        for row in range(rows):
            text = torch.cat([texts[0, : context + row + 1], texts[1, context + row + 1 : context + row + 4]])
            expected = model(text[None], use_cache=False).logits[0, -3:]
            torch.testing.assert_close(logits[row], expected, atol=1e-3, rtol=1e-3)


def plant(patch, kind, fault):
    """Let layers begin with wrong states of one kind, "conv" or "recurrent": modules that step, and kernels."""
    restore, states_of_pass = RecurrentLayer.restore, RecurrentLayer.states_of_pass

    def spoil(state, before, later):
        state.copy_({"not restored": before, "one token late": later}.get(fault, state.roll(1, -1)))

    def wrong_restore(self, entry, index=None):
        before = {name: state.clone() for name, state in self.states()}
        restore(self, entry, index)
        for name, state in self.states():
            if name[0] == kind and index in (None, name[1]):
                kept = self.kept[name]
                spoil(state, before[name], kept.index_select(0, (entry + state.shape[0]) % kept.shape[0]))

    def wrong_states_of_pass(self):
        found = states_of_pass(self)
        if found is not None:
            kept = found[("conv", "recurrent").index(kind)]
            later = kept._replace(slots=kept.slots + 1)
            state = kept.before(0)
            spoil(state, getattr(self, "ended", later).before(-1), later.before(0))
            kept._replace(slots=kept.slots - 1).put(0, state)
            self.ended = later
        return found

    patch.setattr(RecurrentLayer, "restore", wrong_restore)
    patch.setattr(RecurrentLayer, "states_of_pass", wrong_states_of_pass)


FAULTS = [(name, "conv", fault) for name in KINDS for fault in ("not restored", "one token late", "window off by one")]
FAULTS += [(name, "recurrent", fault) for name in KINDS[:-1] for fault in ("not restored", "one token late")]


# Every fault once, in layers that are quickly probed, and one of them in each other kind of layer.
PROBED = [each for each in FAULTS if each[0] == "lfm2" or each[:2] == ("qwen3_next", "recurrent")]
PROBED += [("qwen3_next", "conv", "one token late"), ("mamba2", "recurrent", "one token late")]


@pytest.mark.parametrize(("name", "kind", "fault"), [each if each in PROBED else slowly(*each) for each in FAULTS])
def test_probe_finds_wrong_states(name, kind, fault, monkeypatch):
    model = copy.deepcopy(plain_model(name))
    with monkeypatch.context() as patch:
        plant(patch, kind, fault)
        with pytest.raises(ValueError, match="drafts cannot be rolled back"):
            mask_maker_for(model, "target")
    mask_maker_for(model, "target")


@functools.cache
def probed_pair(name):
    pair = attached_pair(name, noise=0.1)
    assert_equal(*pair, config("vanilla", gamma=3, epsilon=0.0), rows=1)
    return pair


QUICK = ("lfm2", "conv", "window off by one"), ("qwen3_next", "recurrent", "one token late")
SLOWLY = [each if each in QUICK else slowly(*each) for each in FAULTS]


@pytest.mark.parametrize(("name", "kind", "fault"), SLOWLY)
def test_comparison_of_texts_finds_wrong_states(name, kind, fault, monkeypatch):
    pair = probed_pair(name)
    plant(monkeypatch, kind, fault)
    with pytest.raises(AssertionError):
        assert_equal(*pair, config("vanilla", gamma=3, epsilon=0.0), rows=1)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_delta_networks_read_all_tokens_of_a_pass_at_once(name, monkeypatch):
    """A module that computes something else reads token by token."""
    model, calls = copy.deepcopy(plain_model(name)), []
    networks = [module for module in model.modules() if hasattr(module, "A_log")]
    assert list(owners_of(model).replacements) == list(owners_of(model).states) == networks
    runner, tokens = EagerRunner(model, mask_maker_for(model, "target")), torch.arange(6)[None]
    networks[0].out_proj.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        runner.prefill(tokens[:, :3], tokens[:, :3], None)
        runner.forward(tokens[:, 3:], tokens[:, 3:], tokens[:, 3:], tokens[None] <= tokens[:, 3:, None])
    assert len(calls) == 2  # one for each pass
    odd = copy.deepcopy(plain_model(name))
    monkeypatch.setattr(type(odd.model.layers[0].linear_attn.norm), "forward", lambda self, x, gate: 1.1 * x * gate)
    assert not owners_of(odd).replacements
    assert mask_maker_for(odd, "target")


def sampling_pair(name):
    family_class = family(name).load()
    sizes = dict(vocab_size=VOCABULARY, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    target = tiny_model(family_class, tiny_config(family_class.config_class, **sizes))
    target.generation_config.pad_token_id = 0
    with torch.no_grad():
        target.get_output_embeddings().weight.mul_(0.5)
    return specbranch(target), noisy_copy(copy.deepcopy(target), 0.5)


@pytest.mark.parametrize(
    ("name", "drafting", "samples"),
    [
        ("lfm2", "sample", QUICK_SAMPLES),
        *(slowly(name, drafting, FEWER_SAMPLES) for name in KINDS for drafting in ("greedy", "sample")),
    ],
)
def test_samples_follow_the_target(name, drafting, samples, monkeypatch):
    pair = sampling_pair(name)
    expected = exact_distribution(pair[0])
    settings = config("vanilla", gamma=2, epsilon=0.0, draft_sampling=drafting)
    assert p_value(draw(settings, samples, pair=pair), expected) > SMALLEST_P
    plant(monkeypatch, "conv", "not restored")
    assert p_value(draw(settings, FEWEST_SAMPLES, pair=pair), expected) < SMALLEST_P


@pytest.mark.compat
@pytest.mark.parametrize("name", ["qwen3_next", slowly("falcon_h1")])
def test_conversation_continues_in_the_same_cache(name):
    """The rows end at different lengths; the states of the cache are those of plain `generate()` after every turn."""
    plain, model, draft = attached_pair(name)
    caches = {each: DynamicCache(config=plain.config) for each in (plain, model)}
    ids, mask = prompt(3, length=7, vocabulary=40).values()
    for _ in range(3):
        texts = []
        for side, more in ((plain, {}), (model, {"assistant_model": draft, "specbranch": config("vanilla")})):
            cache = {"past_key_values": caches[side], "eos_token_id": ENDS, "pad_token_id": 0}
            texts.append(side.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False, **cache, **more))
        assert torch.equal(*texts) and model.specbranch_stats is not None
        for ours, theirs in zip(caches[model].layers, caches[plain].layers):
            for states in ("conv_states", "recurrent_states"):
                for index, state in getattr(theirs, states, {}).items():
                    torch.testing.assert_close(getattr(ours, states)[index], state, atol=1e-4, rtol=1e-4)
        ids = torch.cat([texts[0], texts[0][:, :4]], dim=1)
        mask = torch.cat([mask, torch.ones_like(ids[:, mask.shape[1] :])], dim=1)


def test_states_without_a_length_are_left_to_transformers(caplog):
    plain, model, draft = attached_pair("mamba")
    cache = plain(input_ids=torch.tensor([[5, 6, 7]]), use_cache=True).cache_params
    with caplog.at_level(logging.WARNING):
        model.generate(**prompt(), max_new_tokens=3, assistant_model=draft, cache_params=cache)
    assert "recurrent states alone" in caplog.text and model.specbranch_stats is None


def test_modules_have_their_own_forward_after_a_call():
    plain, model, draft = attached_pair("lfm2")
    assert_equal(plain, model, draft, config("vanilla"))
    assert not any("forward" in module.__dict__ for module in (*model.modules(), *draft.modules()))
