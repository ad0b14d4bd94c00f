"""A whole pass through the kernels is compared with the model's own, and wrong kernels are refused."""

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import transformers as tf

from hf_specbranch import SpecBranchConfig, specbranch
from hf_specbranch.kernels.norm import LAYER_NORM, WIDE
from hf_specbranch.layers import fuse, fused
from hf_specbranch.layers.decoder_layer import LayerForward
from hf_specbranch.layers.norm import NormForward
from hf_specbranch.model_state import state_of
from hf_specbranch.runtime import cuda_graph, self_check
from hf_specbranch.runtime.mask_probe import mask_maker_for

from .families import FAMILIES, make
from .models import slowly

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # many CPUs are very slow in bfloat16
DTYPES = [torch.float32, HALF]
SHAPE = dict(vocab_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)


@pytest.fixture(autouse=True)
def plain_products():
    """Disable mkldnn: its set-up per product takes longer than these products."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def deep(dtype, layers=32):
    """Return a model of many layers."""
    torch.manual_seed(0)
    config = tf.GraniteConfig(
        **SHAPE, hidden_size=32, num_hidden_layers=layers, initializer_range=0.2, logits_scaling=8.0,
        residual_multiplier=0.22, attention_multiplier=0.25,
    )  # fmt: skip
    return tf.GraniteForCausalLM(config).to(DEVICE, dtype).eval()


def wide(dtype):
    """Return a model with LayerNorm, whose inputs have a mean that is small relative to their spread."""
    torch.manual_seed(0)
    config = tf.Cohere2Config(**{**SHAPE, "intermediate_size": 16}, hidden_size=4096, head_dim=8, num_hidden_layers=2)
    return tf.Cohere2ForCausalLM(config).to(DEVICE, dtype).eval()


def layers_of(model):
    return cuda_graph.layers_for(model, mask_maker_for(model, "target"), rows=1)


# Layers of different structure; other tests compare the kernels of every family.
DIFFERENT = ("llama", "mistral-sliding", "qwen3", "gemma3", "cohere2", "gpt-neox", "gpt2", "mixtral", "gpt-oss")


@pytest.mark.parametrize(
    "dtype", [slowly(torch.float32), pytest.param(HALF, marks=[pytest.mark.compat, pytest.mark.matrix])]
)
@pytest.mark.parametrize("family", [each if each in DIFFERENT else slowly(each) for each in FAMILIES])
def test_correct_kernels_pass(family, dtype, caplog):
    caplog.set_level(logging.WARNING, "hf_specbranch")
    assert layers_of(make(family).to(DEVICE, dtype)) == "fused"
    assert not [record for record in caplog.records if record.name.startswith("hf_specbranch")]


@contextmanager
def changed(module, change):
    """Change what a module returns."""
    hook = module.register_forward_hook(lambda module, args, output: change(args, output))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def swapped(first, second):
    """Run two layers in the wrong order."""
    kept = first.__dict__.pop("forward", first.forward), second.__dict__.pop("forward", second.forward)
    second.forward, first.forward = kept  # in each other's place
    try:
        yield
    finally:
        del first.forward, second.forward


FAULTS = {
    "one layer without its residual": lambda model: changed(model.model.layers[20], lambda args, out: out - args[0]),
    "one layer without its mlp": lambda model: changed(model.model.layers[31].mlp, lambda args, out: 0 * out),
    "one layer twice as strong": lambda model: changed(model.model.layers[5].mlp, lambda args, out: 2 * out),
    "attention sees another token": lambda model: changed(
        model.model.layers[7].self_attn, lambda args, out: (out[0].roll(1, dims=1), out[1])
    ),
    "two layers swapped": lambda model: swapped(model.model.layers[8], model.model.layers[9]),
    "logits not scaled": lambda model: changed(model.lm_head, lambda args, out: 8 * out),
    "not finite": lambda model: changed(model.lm_head, lambda args, out: out / 0),
    "final norm left out": lambda model: changed(model.model.norm, lambda args, out: args[0]),
}


def plant(fault, monkeypatch):
    """Plant a fault in the passes through the kernels, not in the model's own."""

    @contextmanager
    def faulty(model):
        with fused(model), fault(model):
            yield model

    monkeypatch.setattr(self_check, "fused", faulty)


QUICK, SLOW = list(FAULTS)[:1], list(FAULTS)[1:]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(HALF, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_planted_faults_are_found(fault, dtype, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "hf_specbranch")
    model = deep(dtype)
    plant(FAULTS[fault], monkeypatch)
    assert layers_of(model) == layers_of(model) == "plain"
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "GraniteForCausalLM runs without our GPU kernels"
    ]


def test_kernels_that_raise_are_refused(monkeypatch, caplog):
    def fail(args, out):
        raise RuntimeError("out of shared memory")

    plant(lambda model: changed(model.model.layers[3], fail), monkeypatch)
    assert layers_of(deep(torch.float32, layers=4)) == "plain"
    assert "out of shared memory" in caplog.text


def test_moved_weights_are_checked_again(monkeypatch):
    model = deep(torch.float32, layers=2)
    assert layers_of(model) == "fused"
    plant(FAULTS["logits not scaled"], monkeypatch)
    assert layers_of(model) == "fused"
    model.to(HALF)
    assert layers_of(model) == "plain"


def test_check_has_no_side_effects():
    model = deep(HALF, layers=2)
    fuse(model)
    before, drawn = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    layers_of(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not any(module._forward_hooks or "forward" in module.__dict__ for module in model.modules())


def forms(model):
    fuse(model)
    with fused(model):
        replacements = [getattr(vars(module).get("forward"), "ours", None) for module in model.modules()]
    return [replacement.form for replacement in replacements if isinstance(replacement, NormForward)]


@pytest.mark.compat
@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_is_recognised(dtype):
    """Also where the mean of its input is below the rounding of bfloat16."""
    assert forms(wide(dtype)) == [LAYER_NORM] * 3


@pytest.mark.slow
def test_rms_norm_for_layer_norm_is_found(monkeypatch):
    @contextmanager
    def without_means(model):
        for module in model.modules():
            replacement = getattr(vars(module).get("forward"), "ours", None)
            if isinstance(replacement, (NormForward, LayerForward)):  # a layer computes its norms itself
                replacement.form = WIDE
        yield

    plant(without_means, monkeypatch)
    assert layers_of(wide(HALF)) == "plain"


def test_noise_stays_in_its_thread():
    """Another thread may generate with the model while it is checked."""
    model, ids = wide(torch.float32), torch.tensor([[1, 2, 3]], device=DEVICE)
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        expected = model(ids).logits
        with self_check._rounding_noise(model):
            assert not torch.equal(model(ids).logits, expected)
            assert torch.equal(pool.submit(torch.no_grad()(model), ids).result().logits, expected)


def latent(dtype=torch.float32):
    """Return a model with latent attention, which expands the keys and values of all slots that the cache returns."""
    torch.manual_seed(0)
    config = tf.DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4}, hidden_size=64, num_hidden_layers=2, moe_intermediate_size=32,
        n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=None,
        kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32,
    )  # fmt: skip
    return tf.DeepseekV3ForCausalLM(config).to(DEVICE, dtype).eval()


@pytest.mark.compat
@pytest.mark.matrix
def test_latent_attention_needs_masks():
    """Under spans the cache returns all slots that addresses are reserved for, and few have memory."""
    model = latent()
    assert layers_of(model) == "fused"
    assert list(state_of(model).kernel_checks.values()) == ["masks"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_attention_reads_memory_that_exists(dtype):
    """In the dry run of the first call too."""
    model = specbranch(latent(dtype))
    ids = torch.arange(3, 43, device=DEVICE)[None]
    kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}
    own = SpecBranchConfig(policy="autoregressive", kernels=True)
    out = model.generate(ids, **kwargs, specbranch=own)
    torch.cuda.synchronize()
    if dtype == torch.float32:  # the model's own experts run, which wait for the device
        assert torch.equal(out, model.generate(ids, **kwargs, specbranch=False))
    else:
        assert model.specbranch_stats.runtime == "graph"
