"""What else `generate()` is given for a model reaches every pass of the target, as in plain `generate()`."""

import pytest
import torch
import transformers as tf

from .models import EOS, PAD, VOCABULARY, attached, config, llama, noisy_copy, prompt, slowly

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # GPT-BigCode

SPECIAL = {"vocab_size": VOCABULARY, "eos_token_id": EOS, "bos_token_id": 1, "pad_token_id": PAD}
SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
BERT = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
    is_decoder=True, type_vocab_size=4,
)  # fmt: skip

TYPED = {
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**SPECIAL, **SMALL)),
    "gptj": lambda: tf.GPTJForCausalLM(tf.GPTJConfig(**SPECIAL, **SMALL, rotary_dim=4)),
    "codegen": lambda: tf.CodeGenForCausalLM(tf.CodeGenConfig(**SPECIAL, **SMALL, rotary_dim=4, n_ctx=64)),
    "gpt-bigcode": lambda: tf.GPTBigCodeForCausalLM(tf.GPTBigCodeConfig(**SPECIAL, **SMALL)),
    "bert": lambda: tf.BertLMHeadModel(tf.BertConfig(**SPECIAL, **BERT)),
}
CASES = [(family, policy) for family in TYPED for policy in ("specbranch", "autoregressive")]
QUICK = ("gpt2", "specbranch"), ("bert", "autoregressive")


def make(kind, seed=0):
    torch.manual_seed(seed)
    model = kind().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # texts that depend on their inputs
    return model


def plain_and_ours(target, policy, rows, **arguments):
    kwargs = {**prompt(rows), "max_new_tokens": 12, "do_sample": False, **arguments}
    plain = target.generate(**kwargs)
    settings = config(policy, epsilon=0.0)
    ours = attached(target).generate(**kwargs, assistant_model=noisy_copy(target, 0.05, seed=1), specbranch=settings)
    return plain, ours


@pytest.mark.compat
@pytest.mark.parametrize(("family", "policy"), [each if each in QUICK else slowly(*each) for each in CASES])
def test_token_types_go_on_with_the_last_one(family, policy):
    target = make(TYPED[family])
    for rows in (1, 2):
        types = torch.randint(0, 4, (rows, 7), generator=torch.Generator().manual_seed(0))
        types[:, -1] = 3
        plain, ours = plain_and_ours(target, policy, rows, token_type_ids=types)
        assert torch.equal(ours, plain)
        assert not torch.equal(plain, target.generate(**prompt(rows), max_new_tokens=12, do_sample=False))


def test_recorded_outputs_are_those_with_token_types():
    target = make(TYPED["gpt2"])
    types = torch.tensor([[0, 0, 1, 1, 2, 2, 3]] * 3)
    asked = {"return_dict_in_generate": True, "output_logits": True, "eos_token_id": list(range(0, VOCABULARY, 7))}
    plain, ours = plain_and_ours(target, "specbranch", 3, token_type_ids=types, **asked)
    assert torch.equal(ours.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(plain.logits), atol=1e-3, rtol=1e-3)


def test_stages_are_not_captured_with_arguments_of_the_call(static_stages):
    target = make(TYPED["gpt2"])
    model, draft = attached(target), noisy_copy(target, 0.05, seed=1)
    kwargs = {**prompt(), "token_type_ids": torch.full((1, 7), 3), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(**kwargs, assistant_model=draft), target.generate(**kwargs))
    assert model.specbranch_stats.slowed_by == "token_type_ids must be given to every pass of the target"


class Tilted(tf.LlamaForCausalLM):
    """Is told by how much to prefer each token, once and for all."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, tilt=None, **kwargs):
        out = super().forward(input_ids, attention_mask, position_ids, **kwargs)
        if tilt is not None:
            out.logits = out.logits + tilt[:, None]
        return out


class Counted(Tilted):
    """Is told how long the text is."""

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        length = torch.full((input_ids.shape[0], VOCABULARY), float(input_ids.shape[1]))
        return {**super().prepare_inputs_for_generation(input_ids, **kwargs), "tilt": length}


def as_class(kind):
    model = llama(seed=0)
    model.__class__ = kind
    return model


@pytest.mark.compat
@pytest.mark.matrix
@pytest.mark.parametrize("policy", [*map(slowly, ("autoregressive", "vanilla", "pearl")), "specbranch"])
def test_a_constant_argument_reaches_every_pass(policy):
    target = as_class(Tilted)
    for rows in (1, 2):
        tilt = 5 * torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(rows))
        plain, ours = plain_and_ours(target, policy, rows, tilt=tilt)
        assert torch.equal(ours, plain)
        assert not torch.equal(plain, target.generate(**prompt(rows), max_new_tokens=12, do_sample=False))


@pytest.mark.compat
def test_cross_attention_inputs_reach_every_pass():
    target = make(lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**SPECIAL, **SMALL, add_cross_attention=True)))
    states = torch.randn((2, 5, 32), generator=torch.Generator().manual_seed(0))
    plain, ours = plain_and_ours(target, "specbranch", 2, encoder_hidden_states=states)
    assert torch.equal(ours, plain)
    assert not torch.equal(plain, target.generate(**prompt(2), max_new_tokens=12, do_sample=False))


def test_an_argument_that_changes_at_each_token_is_refused():
    with pytest.raises(ValueError, match="Counted is given another tilt at each token"):
        attached(as_class(Counted)).generate(**prompt(), assistant_model=llama(seed=1), max_new_tokens=5)
