"""Quantised models: layers are recognised by their tensors, and decode as the dequantised model does."""

import functools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GemmaConfig, Qwen2Config

from hf_specbranch import specbranch
from hf_specbranch.decoding.draft_copy import DraftForm, copy_of
from hf_specbranch.kernels import autotune
from hf_specbranch.kernels.autotune import PlanCache, read_plans
from hf_specbranch.kernels.checksum import checksum
from hf_specbranch.kernels.gemv import GEMV_PLANS
from hf_specbranch.kernels.linear import Partials, Plan
from hf_specbranch.kernels.norm import add_norm, normalise
from hf_specbranch.kernels.packed import dequantise
from hf_specbranch.kernels.rotary import rotary
from hf_specbranch.layers import fuse, fused
from hf_specbranch.layers.attention import AttentionForward
from hf_specbranch.layers.mlp import MlpForward
from hf_specbranch.layers.product import Tuned
from hf_specbranch.layers.quantised import QuantisedProduct
from hf_specbranch.layers.quantised_formats import recognise_format
from hf_specbranch.machine import sample_of
from hf_specbranch.model_state import every_tensor, weight_bytes
from hf_specbranch.planning.sizes import size_of
from hf_specbranch.runtime.fingerprint import fingerprint
from hf_specbranch.runtime.selection import why_not_captured

from .families import make_tiny
from .graphs import Comparison, tokens
from .kernels import DEVICE, logits_over_branches, where_triton_runs
from .models import config, noisy_copy, slowly
from .quantised import AwqLinear, Float8Linear, GptqLinear, WordsLinear, pack_last, quantised_model

KINDS = (Float8Linear, WordsLinear, GptqLinear)


@pytest.mark.parametrize(
    "kind", [*KINDS, functools.partial(GptqLinear, version=2), functools.partial(WordsLinear, group=128)]
)
def test_formats_are_recognised(kind):
    layer = kind(torch.randn(128, 256))
    read = recognise_format(layer)
    assert read is not None
    torch.testing.assert_close(dequantise(read(layer)), layer.dense())


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_compute_something_else_are_not_recognised(kind):
    layer = kind(torch.randn(128, 256))
    layer.forward = lambda x: 1.1 * type(layer).forward(layer, x)
    assert recognise_format(layer) is None
    layer = type("Scaled", (kind,), {"forward": lambda self, x: 1.1 * kind.forward(self, x)})(torch.randn(128, 256))
    assert recognise_format(layer) is None


def test_layers_without_their_package_are_recognised_by_their_tensors():
    def forward(self, x):
        raise ImportError("a kernel from the Hub")

    layer = type("Missing", (Float8Linear,), {"forward": forward})(torch.randn(128, 256))
    assert recognise_format(layer) is not None


def test_groups_out_of_order_are_not_recognised():
    layer = GptqLinear(torch.randn(128, 256))
    layer.g_idx = layer.g_idx.flip(0)
    assert recognise_format(layer) is None


@pytest.mark.parametrize("kind", [*map(slowly, (Float8Linear, WordsLinear)), GptqLinear, slowly(AwqLinear)])
def test_quantised_model_decodes_as_dequantised(kind, graph_runners):
    model, dense = quantised_model(kind)
    text = Comparison(model, noisy_copy(dense, 0.2, 1), runtime="graph")(tokens(12))
    expected = dense.generate(tokens(12), max_new_tokens=24, min_new_tokens=24, do_sample=False)
    assert torch.equal(text, expected)


@pytest.mark.parametrize("kind", [*KINDS, AwqLinear])
def test_quantised_model_is_replaced_whole(kind):
    model, _ = quantised_model(kind)
    fuse(model)
    expected = logits_over_branches(model)
    torch.testing.assert_close(logits_over_branches(model, fused), expected, atol=1e-4, rtol=1e-4)
    with fused(model):
        ours = [getattr(module.forward, "ours", None) for module in model.modules()]
    for replacement in (AttentionForward, MlpForward):
        found = [each for each in ours if isinstance(each, replacement)]
        assert len(found) == model.config.num_hidden_layers
        assert all(isinstance(each.output, QuantisedProduct) for each in found) == (kind is not AwqLinear)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_are_joined(kind):
    model, _ = quantised_model(kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    undo = fuse(model)
    expected = logits_over_branches(model)
    attention = model.model.layers[0].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    operands = QuantisedProduct(layers, [recognise_format(layer) for layer in layers], Tuned())._operands()
    assert len(operands.weights) == (3 if kind is GptqLinear else 1)  # whose rows are the last dimension
    torch.testing.assert_close(
        torch.cat([dequantise(weight) for weight in operands.weights]), torch.cat([layer.dense() for layer in layers])
    )
    undo()
    assert torch.equal(logits_over_branches(model), expected)
    after = model.state_dict()
    assert all(torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8)) for name in before)


@where_triton_runs
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_in_quantised_model(kind, monkeypatch):
    model, _ = quantised_model(kind)
    model = model.to(DEVICE, torch.float16) if kind is not Float8Linear else _half_but_float8(model)
    fuse(model)
    expected, kinds = logits_over_branches(model, device=DEVICE), []

    def plan(product, x, kind):
        kinds.append(kind)
        return Plan(1, 2, 64)

    monkeypatch.setattr(QuantisedProduct, "_plan", plan)
    torch.testing.assert_close(logits_over_branches(model, fused, DEVICE), expected, atol=5e-2, rtol=5e-2)
    usual = {"split-k", "whole", "whole" if kind is GptqLinear else "gated"}
    assert set(kinds) == usual | {"normed-gated"}  # whether that is faster was asked


NORMS = [f"hf_specbranch.layers.{name}" for name in ("norm.normalise", "product.normalise", "quantised.normalise")]


@where_triton_runs
@pytest.mark.parametrize(("family", "weights"), [(Qwen2Config, "float8"), (GemmaConfig, "int8")])
def test_norms_and_sums_of_few_rows_run_in_the_products(family, weights, monkeypatch):
    """And so do rotary embeddings. A layer then launches four products and attention; the model one norm, the last."""
    model = draft_copy(family, weights, DEVICE)
    expected, norms, rotations = logits_over_branches(model, fused, DEVICE), [], []
    monkeypatch.setattr(QuantisedProduct, "_plan", lambda product, x, kind: GEMV_PLANS[0])
    monkeypatch.setattr("hf_specbranch.layers.attention.rotary", counted(rotary, rotations))
    monkeypatch.setattr("hf_specbranch.layers.decoder_layer.add_norm", counted(add_norm, norms))
    for name in NORMS:
        monkeypatch.setattr(name, counted(normalise, norms))
    torch.testing.assert_close(logits_over_branches(model, fused, DEVICE), expected, atol=2e-2, rtol=2e-2)
    assert len(norms) == 1 and not rotations


@where_triton_runs
def test_norms_and_sums_of_few_rows_run_in_dense_products(monkeypatch):
    """As in the test before, where that is faster; elsewhere layers are as they were."""
    model, norms, rotations = draft_copy(Qwen2Config, None, DEVICE), [], []
    expected = logits_over_branches(model, fused, DEVICE)
    monkeypatch.setattr("hf_specbranch.layers.attention.rotary", counted(rotary, rotations))
    monkeypatch.setattr("hf_specbranch.layers.decoder_layer.add_norm", counted(add_norm, norms))
    for name in NORMS[:2]:
        monkeypatch.setattr(name, counted(normalise, norms))
    for plan in (None, Plan(1, 0, 16, 2, 1)):
        monkeypatch.setattr(Tuned, "fused", lambda self, x, weight, kind, plan=plan: plan)
        norms.clear(), rotations.clear()
        torch.testing.assert_close(logits_over_branches(model, fused, DEVICE), expected, atol=2e-2, rtol=2e-2)
        assert (len(norms) == 1 and not rotations) == (plan is not None)


def test_layers_leave_norms_and_sums_to_their_products(monkeypatch):
    """Without a kernel the products compute the same in several steps."""
    model, norms = draft_copy(Qwen2Config, "int8").float(), []
    expected = logits_over_branches(model, fused)
    monkeypatch.setattr(QuantisedProduct, "fuses", lambda product, x, kind: x.shape[1] <= 4)
    monkeypatch.setattr("hf_specbranch.layers.decoder_layer.add_norm", lambda *_: pytest.fail("a norm by itself"))
    monkeypatch.setattr("hf_specbranch.layers.product.normalise", counted(normalise, norms))
    torch.testing.assert_close(logits_over_branches(model, fused), expected, atol=1e-4, rtol=1e-4)
    assert len(norms) == 4  # of two layers


def draft_copy(family, weights, device="cpu"):
    sizes = dict(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
    shape = family(**sizes, num_key_value_heads=2, head_dim=32, pad_token_id=0)
    draft = make_tiny(lambda: AutoModelForCausalLM.from_config(shape)).to(device, torch.float16)
    model = draft if weights is None else copy_of(draft, DraftForm(weights))
    fuse(model)
    return model


def counted(function, calls):
    return lambda *given, **named: calls.append(1) or function(*given, **named)


def test_a_known_plan_takes_no_look_at_the_weights(monkeypatch, tmp_path):
    """They would be looked at for each product of a layer and each layer, whenever a stage is captured."""
    monkeypatch.setattr(autotune, "plans", PlanCache(tmp_path / "products.json", tmp_path / "none.json"))
    monkeypatch.setattr(autotune, "gpu_and_versions", lambda device: "gpu|torch|triton")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(autotune, "seconds_of_each", lambda product, weights, x, plans: {plans[-1]: 1.0})
    looks, given = [], (torch.ones(1, 3, 8), "float8", (16, 64), "normed")
    candidates = lambda x, weights, kind: [Plan(1, x.shape[0]), Plan(*weights)]  # noqa: E731
    for _ in range(2):
        found = autotune.autotune_quantised(None, lambda: looks.append(1) or (2, 5), candidates, *given)
        assert found == Plan(2, 5)
    assert len(looks) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_products_are_autotuned(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "plans", cache := PlanCache(tmp_path / "products.json", tmp_path / "none.json"))
    layers = [kind(torch.randn(1024, 1024) / 32).to("cuda") for _ in range(4)]
    tuned = Tuned()
    products = [QuantisedProduct([layer], [recognise_format(layer)], tuned) for layer in layers]
    x = torch.randn(9, 1024, device="cuda", dtype=torch.bfloat16)
    expected = x.float() @ layers[1].dense().float().cuda().T
    product = products[1].split_k(x)
    product = product.sum() if isinstance(product, Partials) else product
    torch.testing.assert_close(product.float(), expected, atol=3e-2, rtol=3e-2)
    (key,) = read_plans(cache.file)
    assert products[1].name in key and key.endswith("1024x1024|split-k")
    gated = products[2].gated(x, "silu")
    gate, up = (x.float() @ layers[2].dense().float().cuda().T).to(torch.bfloat16).chunk(2, -1)
    torch.testing.assert_close(gated, torch.nn.functional.silu(gate) * up, atol=5e-2, rtol=5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*KINDS, AwqLinear])
def test_quantised_model_is_captured(kind):
    model, _ = quantised_model(kind)
    model = _half_but_float8(model)
    model.hf_quantizer = object()
    model = specbranch(model)
    for _ in range(2):
        model.generate(tokens(12, device="cuda"), max_new_tokens=16, specbranch=config("autoregressive"))
        assert model.specbranch_stats.runtime == "graph"


def _half_but_float8(model):
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(torch.float16)
    return model.to(DEVICE)


class NoWaiting(TorchDispatchMode):
    """Forbids to read a value on the host, as a capture does."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_known_weights_are_read_without_waiting(kind):
    layer = kind(torch.randn(128, 256))
    read = recognise_format(layer)
    with NoWaiting():
        assert read(layer) is not None
    if kind is GptqLinear:
        layer.g_idx[0] = 1
        assert read(layer) is None  # its groups are no longer in order


@pytest.mark.parametrize("kind", KINDS)
def test_size_of_packed_weights(kind):
    model, dense = quantised_model(kind)
    per_element = 8 if kind is Float8Linear else 4
    linear = sum(module.weight.numel() for module in dense.model.layers.modules() if isinstance(module, nn.Linear))
    saved = linear * (32 - per_element) // 8
    assert saved * 0.9 < weight_bytes(dense) - weight_bytes(model) < saved
    embeddings = model.get_input_embeddings().weight.nbytes  # a pass reads a row per token
    assert size_of(model).weights == weight_bytes(model) - embeddings
    assert size_of(model).kv_token == size_of(dense).kv_token


@pytest.mark.parametrize("kind", KINDS)
def test_fingerprint_follows_packed_weights(kind):
    model, _ = quantised_model(kind)
    before = fingerprint(model)
    assert fingerprint(model) == before
    layer = model.model.layers[1].mlp.down_proj
    name = {Float8Linear: "weight_scale_inv", WordsLinear: "weight_packed", GptqLinear: "qweight"}[kind]
    getattr(layer, name).data = getattr(layer, name).data.clone()
    assert fingerprint(model) != before


@pytest.mark.parametrize("kind", KINDS)
def test_checksum_finds_changed_packed_weights(kind):
    model, _ = quantised_model(kind)
    before = checksum(every_tensor(model))
    assert torch.equal(checksum(every_tensor(model)), before)
    layer = model.model.layers[1].mlp.down_proj
    name = {Float8Linear: "weight", WordsLinear: "weight_packed", GptqLinear: "qweight"}[kind]
    getattr(layer, name).data.view(torch.uint8)[3, 5] ^= 1
    assert not torch.equal(checksum(every_tensor(model)), before)


def test_float8_linear_of_transformers():
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    ours = Float8Linear(torch.randn(256, 128))
    layer = fp8.FP8Linear(128, 256, block_size=(128, 128))
    layer.load_state_dict(ours.state_dict())
    read = recognise_format(layer)  # without the kernel from the Hub its forward raises ImportError
    assert read is not None
    torch.testing.assert_close(dequantise(read(layer)), ours.dense())


def test_quantised_models_are_tried():
    model, _ = quantised_model(GptqLinear)
    model.hf_quantizer = object()
    assert why_not_captured(model) == "it is not on a CUDA device"


def test_torchao_int8():
    quantization = pytest.importorskip("torchao.quantization")
    _, dense = quantised_model(WordsLinear)
    quantization.quantize_(dense.model.layers, quantization.Int8WeightOnlyConfig())
    layer = dense.model.layers[0].mlp.down_proj
    read = recognise_format(layer)
    assert read is not None
    torch.testing.assert_close(dequantise(read(layer)), layer.weight.dequantize().float())
    assert all(type(part) in (torch.Tensor, nn.Parameter) for part in every_tensor(dense))
    assert isinstance(fingerprint(dense), int) and sample_of(dense)
    expected = logits_over_branches(dense)
    torch.testing.assert_close(logits_over_branches(dense, fused), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_4_bits(kind):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear4bit(256, 64, bias=False, quant_type=kind, compress_statistics=False)
    layer.load_state_dict({"weight": torch.randn(64, 256) / 16})
    layer = layer.to("cpu")
    layer(torch.randn(1, 256))
    read = recognise_format(layer)
    assert read is not None
    x = torch.randn(3, 256)
    torch.testing.assert_close(x @ dequantise(read(layer)).T, layer(x), atol=1e-3, rtol=1e-3)


def test_words_hold_the_first_element_in_the_lowest_bits():
    assert pack_last(torch.arange(8)[None]).item() == 0x76543210
