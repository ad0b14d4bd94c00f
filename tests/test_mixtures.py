"""Mixtures of experts: routers, experts and blocks are replaced where they compute what the kernels compute."""

import copy

import pytest
import torch
import transformers as tf

from hf_specbranch.kernels.backend import INTERPRETED
from hf_specbranch.layers import fuse, fused
from hf_specbranch.layers.attention import AttentionForward
from hf_specbranch.layers.decoder_layer import LayerForward
from hf_specbranch.layers.mixture import ExpertsForward, MixtureForward
from hf_specbranch.layers.mlp import MlpForward
from hf_specbranch.layers.router import RouterForward

from .families import _USUAL, make_tiny
from .kernels import logits_over_branches

_EXPERTS = dict(num_experts=8, num_experts_per_tok=3)
_MLA = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
_GROUPS = dict(n_routed_experts=8, num_experts_per_tok=3, n_group=2, topk_group=1, first_k_dense_replace=1)
ALL = {RouterForward: 2, ExpertsForward: 2, MixtureForward: 2, LayerForward: 2}

MIXTURES = {
    "qwen2-moe": (
        lambda: tf.Qwen2MoeForCausalLM(
            tf.Qwen2MoeConfig(**_USUAL, **_EXPERTS, moe_intermediate_size=32, shared_expert_intermediate_size=48)
        ),
        {**ALL, MlpForward: 2},
    ),
    "qwen3-moe": (
        lambda: tf.Qwen3MoeForCausalLM(
            tf.Qwen3MoeConfig(**_USUAL, **_EXPERTS, head_dim=8, moe_intermediate_size=48, norm_topk_prob=True)
        ),
        ALL,
    ),
    "mixtral": (
        lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**_USUAL, num_local_experts=4, num_experts_per_tok=2)),
        ALL,
    ),
    "olmoe": (lambda: tf.OlmoeForCausalLM(tf.OlmoeConfig(**_USUAL, **_EXPERTS)), ALL),
    "gpt-oss": (
        lambda: tf.GptOssForCausalLM(
            tf.GptOssConfig(**_USUAL, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=6)
        ),
        {**ALL, AttentionForward: 2},  # with sinks, and angles of one half of a head
    ),
    "granite-moe": (
        lambda: tf.GraniteMoeForCausalLM(
            tf.GraniteMoeConfig(**_USUAL, num_local_experts=8, num_experts_per_tok=3, residual_multiplier=0.5)
        ),
        ALL,  # its layers scale what they add
    ),
    "glm4-moe": (
        lambda: tf.Glm4MoeForCausalLM(
            tf.Glm4MoeConfig(**_USUAL, **_GROUPS, head_dim=8, moe_intermediate_size=32, n_shared_experts=1)
        ),
        {RouterForward: 0, ExpertsForward: 1, MixtureForward: 1, MlpForward: 2, LayerForward: 2},  # one dense layer
    ),
    "deepseek-v3": (
        lambda: tf.DeepseekV3ForCausalLM(
            tf.DeepseekV3Config(
                **{**_USUAL, "num_key_value_heads": 4}, **_GROUPS, **_MLA, moe_intermediate_size=32, n_shared_experts=2
            )
        ),
        {RouterForward: 0, ExpertsForward: 1, MixtureForward: 1, MlpForward: 2, LayerForward: 2},
    ),
}  # fmt: skip


def make(family, seed=0):
    return make_tiny(MIXTURES[family][0], seed)


def replacements(model):
    fuse(model)
    with fused(model):
        return {module: type(module.forward.ours) for module in model.modules() if "forward" in module.__dict__}


@pytest.mark.compat
@pytest.mark.parametrize("family", MIXTURES)
def test_mixture_is_replaced_and_computes_the_same(family):
    model = make(family)
    expected, kinds = logits_over_branches(model), list(replacements(model).values())
    assert {kind: kinds.count(kind) for kind in MIXTURES[family][1]} == MIXTURES[family][1]
    torch.testing.assert_close(logits_over_branches(model, fused), expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(logits_over_branches(model), expected)


@pytest.mark.skipif(not INTERPRETED, reason="runs under the interpreter")
@pytest.mark.parametrize("family", ["qwen2-moe", "gpt-oss", "mixtral"])
def test_kernel_mixture_computes_the_same(family):
    model = make(family)
    torch.testing.assert_close(logits_over_branches(model, fused), logits_over_branches(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 33])
def test_mixture_takes_any_number_of_tokens(tokens):
    """More tokens than the kernels take run the model's own code."""
    model = make("qwen2-moe")
    ids = torch.arange(tokens)[None] % 60
    with torch.no_grad():
        expected = model(ids).logits
        with fused(model):
            torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-4)


def changed(module, change):
    """Make a module compute something else."""

    class Changed(type(module)):
        def forward(self, *args, **kwargs):
            return change(super().forward(*args, **kwargs))

    module.__class__ = Changed


@pytest.mark.parametrize(
    "part, change",
    [
        ("gate", lambda out: (out[0], 1.1 * out[1], out[2])),
        ("gate", lambda out: (out[0], out[1], (out[2] + 1) % 8)),
        ("experts", lambda out: 1.1 * out),
        ("experts", lambda out: out + 0.1),
    ],
    ids=["other weights", "other experts", "scaled", "shifted"],
)
def test_part_that_computes_otherwise_is_not_replaced(part, change):
    model = make("qwen3-moe")
    block = model.model.layers[0].mlp
    changed(getattr(block, part), change)
    expected, found = logits_over_branches(model), replacements(model)
    assert getattr(block, part) not in found and getattr(model.model.layers[1].mlp, part) in found
    assert (block in found) is (part == "gate")  # the block calls its router, but not its experts
    torch.testing.assert_close(logits_over_branches(model, fused), expected, atol=1e-5, rtol=1e-4)


def test_experts_with_zero_output_are_still_compared():
    model = make("qwen3-moe")
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        experts.down_proj.zero_()
    changed(experts, lambda out: 1.1 * out)
    assert experts not in replacements(model) and not experts.down_proj.any()


def test_tied_experts_do_not_prevent_replacement():
    """Rounding decides which of two tied experts a token takes: here another one in every second call."""
    model = make("qwen3-moe")
    layer, calls = model.model.layers[0], []
    with torch.no_grad():
        layer.mlp.gate.weight[1::2] = layer.mlp.gate.weight[::2]  # every expert has a twin with the same logit

    def twins_of_the_first_token(out):
        calls.append(len(calls) % 2)
        logits, weights, chosen = out
        return logits, weights, torch.cat([chosen[:1] ^ calls[-1], chosen[1:]])

    changed(layer.mlp.gate, twins_of_the_first_token)
    found = replacements(model)
    assert set(calls) == {0, 1} and {layer, layer.mlp, layer.mlp.gate, layer.mlp.experts} <= set(found)


@pytest.mark.gpu
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("tokens", [1, 5, 17])
def test_mixture_in_bfloat16_is_as_close_as_the_model_itself(family, tokens):
    """The distance from float32 is that of the model's own bfloat16, at most 1.5 times."""
    wide = make(family).cuda()
    model = copy.deepcopy(wide).to(torch.bfloat16)
    wide.load_state_dict(model.state_dict())
    fuse(model)
    x = torch.randn((tokens, 32), device="cuda", dtype=torch.bfloat16)
    layer, wide_layer = model.model.layers[1], wide.model.layers[1]
    block, wide_block = (getattr(each, "mlp", None) or each.block_sparse_moe for each in (layer, wide_layer))
    chosen = torch.stack([torch.randperm(4, device="cuda")[:2] for _ in range(tokens)])
    weights = torch.rand((tokens, 2), device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = wide_block.experts(x.float(), chosen, weights.float())
        own = (block.experts(x, chosen, weights).float() - expected).norm()
        with fused(model):
            assert isinstance(block.experts.forward.ours, ExpertsForward)
            ours = (block.experts(x, chosen, weights).float() - expected).norm()
    assert ours <= 1.5 * own
