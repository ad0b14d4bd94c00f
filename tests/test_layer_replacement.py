"""A model whose layers are replaced computes the same, and modules that compute otherwise are not replaced."""

import copy
import logging

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_specbranch import load_demo_pair
from hf_specbranch.bench import grow
from hf_specbranch.decoding.draft_copy import DraftForm, copy_of
from hf_specbranch.kernels import linear as products
from hf_specbranch.kernels.backend import INTERPRETED
from hf_specbranch.kernels.linear import Plan, fits
from hf_specbranch.layers import fuse, fused
from hf_specbranch.layers.angles import AnglesForward, layer_types_of
from hf_specbranch.layers.attention import AttentionForward
from hf_specbranch.layers.base import split_graph
from hf_specbranch.layers.decoder_layer import LayerForward
from hf_specbranch.layers.mlp import MlpForward
from hf_specbranch.layers.products import Tuned
from hf_specbranch.layers.storage import joined

from .families import FAMILIES, make
from .kernels import DEVICE, logits_over_branches, where_triton_runs
from .models import llama, pairs

LLAMA_LIKE = [
    "llama", "llama-eager", "mistral-sliding", "qwen2", "qwen2-sliding", "qwen3", "gemma", "gemma2", "gemma3", "phi3",
]  # fmt: skip
UNGATED = ["starcoder2", "phi", "gpt-neox", "gpt-neox-serial"]
DENSE = [*LLAMA_LIKE, "olmo2", "glm4", "smollm3", "cohere2", "granite", *UNGATED]


@pytest.mark.compat
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_model_computes_the_same(family):
    model = make(family)
    expected = logits_over_branches(model)
    fuse(model)
    assert torch.equal(logits_over_branches(model), expected)  # outside: its own code on the same numbers
    torch.testing.assert_close(logits_over_branches(model, fused), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(logits_over_branches(model), expected)


@where_triton_runs
@pytest.mark.parametrize("family", [*DENSE, "qwen2-moe"])
def test_fused_model_sums_partials(family, monkeypatch):
    """Also in a mixture of experts, where no kernel sums the partials of an expert."""
    model = make(family).to(DEVICE, torch.float16)
    fuse(model)
    expected, plans = logits_over_branches(model, fused, DEVICE), []

    def split(tuned, x, weight, kind):
        plans.append((len(weight) == model.config.hidden_size and kind == "split-k", kind))
        plan = Plan(splits=2 if kind == "split-k" else 1, stages=2)
        assert fits(x, weight, None, plan)
        return plan

    monkeypatch.setattr(products, "BLOCK", 16)  # these models are small
    monkeypatch.setattr(Tuned, "plan", split)
    torch.testing.assert_close(logits_over_branches(model, fused, DEVICE), expected, atol=2e-2, rtol=2e-2)
    assert any(summed for summed, _ in plans)  # with a residual
    assert {"split-k", "whole" if family in UNGATED else "gated"} <= {kind for _, kind in plans}


@pytest.mark.compat
@pytest.mark.parametrize("family", DENSE)
def test_dense_models_are_replaced_whole(family):
    model = make(family)
    fuse(model)
    with fused(model):
        kinds = [type(getattr(module.forward, "ours", None)) for module in model.modules()]
    for kind in (AttentionForward, MlpForward, LayerForward):
        assert kinds.count(kind) == model.config.num_hidden_layers
    assert kinds.count(AnglesForward) == 1
    attention = getattr(model.base_model.layers[0], "self_attn", None)
    if hasattr(attention, "q_proj"):
        assert joined([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]) is not None


@pytest.mark.parametrize("kind, expected", [("default", True), ("dynamic", False), ("odd", False)])
def test_length_dependent_angles_are_not_replaced(kind, expected):
    model = make("llama")
    module = model.model.rotary_emb
    if kind == "odd":
        multiplied(module, 1.1)
    else:
        module.rope_type = kind
    assert (module in replacements(model)) is expected


@pytest.mark.parametrize("odd", [None, "kind", "frequencies"])
def test_angles_by_type_of_layer(odd):
    """All types of layers must be known: one module computes the angles of each."""
    model = make("gemma3")
    module = model.model.rotary_emb
    if odd == "kind":
        module.rope_type = {**module.rope_type, "full_attention": "dynamic"}
    elif odd == "frequencies":
        module.full_attention_inv_freq = module.full_attention_inv_freq[None]
    assert set(module.rope_type) == {"full_attention", "sliding_attention"}
    assert len(layer_types_of(module)) == (2 if odd is None else 0)
    if odd is None:
        assert module in replacements(model)


@pytest.mark.parametrize("part", ["rotary", "norms"])
def test_module_that_cannot_be_examined_runs_its_own_code(part, caplog):
    """It raises for what it is given when it is examined, large positions or shifted states, and for nothing else."""
    model = make("llama")
    expected = logits_over_branches(model)
    module = model.model.rotary_emb if part == "rotary" else model.model.norm

    class OddRotary(type(module)):
        def forward(self, x, position_ids):
            if position_ids.max() > 500:
                raise IndexError("too many indices")
            return super().forward(x, position_ids)

    class OddNorm(type(module)):
        def forward(self, x):
            if (x.mean(-1) / x.std(-1)).max() > 0.7:
                raise IndexError("too many indices")
            return super().forward(x)

    module.__class__ = OddRotary if part == "rotary" else OddNorm
    with caplog.at_level(logging.INFO):
        assert module not in replacements(model)
    assert len([each for each in caplog.messages if "own code" in each]) == 1
    torch.testing.assert_close(logits_over_branches(model, fused), expected, atol=1e-5, rtol=1e-5)


def test_lack_of_memory_is_no_reason_to_run_own_code():
    """Graphs and caches are freed, and the model is examined again."""
    model = make("llama")

    class Large(type(model.model.norm)):
        def forward(self, x):
            if (x.mean(-1) / x.std(-1)).max() > 0.7:  # when it is examined
                raise torch.OutOfMemoryError
            return super().forward(x)

    model.model.norm.__class__ = Large
    with pytest.raises(torch.OutOfMemoryError):
        replacements(model)


@pytest.mark.parametrize("family", ["glm4", "cohere2", "gpt-neox"])
@pytest.mark.parametrize("part", ["attention", "mlp", "layer"])
def test_faulty_module_of_any_structure_is_not_replaced(family, part):
    """No variant of a replacement computes what this module computes."""
    model = make(family)
    layer = model.base_model.layers[1]
    odd = layer if part == "layer" else layer.mlp if part == "mlp" else getattr(layer, "self_attn", None)
    odd = odd or layer.attention
    multiplied(odd, 1.1)
    assert odd not in replacements(model)


@pytest.mark.parametrize("family, rotated", [("smollm3", [True, False]), ("cohere2", [True, False])])
def test_layers_without_rotation_are_found(family, rotated):
    model = make(family)
    fuse(model)
    with fused(model):
        forms = [layer.self_attn.forward.ours.form for layer in model.model.layers]
    assert [form.rotation is not None for form in forms] == rotated


def test_faulty_layer_is_not_replaced():
    model = make("llama")
    odd = model.model.layers[1].self_attn

    class Scaled(type(odd)):
        def forward(self, *args, **kwargs):
            out, weights = super().forward(*args, **kwargs)
            return 1.1 * out, weights

    odd.__class__ = Scaled
    expected = logits_over_branches(model)
    fuse(model)
    torch.testing.assert_close(logits_over_branches(model, fused), expected, atol=1e-5, rtol=1e-5)


def with_zero_output(model, layer=0):
    """Zero the output projections of a layer, as in the first layers of a grown model."""
    with torch.no_grad():
        model.model.layers[layer].self_attn.o_proj.weight.zero_()
        model.model.layers[layer].mlp.down_proj.weight.zero_()
    return model


def replacements(model):
    fuse(model)
    with fused(model):
        return {module: type(module.forward.ours) for module in model.modules() if "forward" in module.__dict__}


def multiplied(module, factor):
    """Make a module return a multiple of what it would."""

    class Multiplied(type(module)):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            return (factor * out[0], *out[1:]) if isinstance(out, tuple) else factor * out

    module.__class__ = Multiplied


@pytest.mark.parametrize(
    ("family", "dtype"),
    pairs(["llama", "qwen3", "gemma2", "phi3", "olmo2", "glm4", "cohere2"], [torch.float32, torch.bfloat16]),
)
def test_layers_with_zero_output_are_replaced(family, dtype):
    model = with_zero_output(make(family).to(dtype))
    drawn = torch.get_rng_state()
    kinds = list(replacements(model).values())
    for kind in (AttentionForward, MlpForward, LayerForward):
        assert kinds.count(kind) == model.config.num_hidden_layers
    layer = model.model.layers[0]
    assert not layer.self_attn.o_proj.weight.any() and not layer.mlp.down_proj.weight.any()
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("weights", ["float8", "int8"])
def test_copies_with_zero_output_are_replaced(weights):
    """The draft of a grown pair, in eight bits."""
    twin = copy_of(with_zero_output(llama(seed=0, hidden=128)), DraftForm(weights))
    kinds = list(replacements(twin).values())
    assert kinds.count(AttentionForward) == kinds.count(LayerForward) == twin.config.num_hidden_layers
    assert not twin.model.layers[0].self_attn.o_proj.weight.float().any()


@pytest.mark.parametrize(
    "shape", [pytest.param("68m", marks=pytest.mark.slow), pytest.param("160m", marks=pytest.mark.slow)]
)
def test_grown_models_are_replaced_whole(shape):
    draft = load_demo_pair()[1]
    model = grow(draft, shape, dtype=torch.bfloat16)
    kinds = list(replacements(model).values())
    for kind in (AttentionForward, MlpForward, LayerForward):
        assert kinds.count(kind) == model.config.num_hidden_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.1, 0.0])
@pytest.mark.parametrize("part", ["self_attn", "mlp"])
def test_faulty_module_with_zero_output_is_not_replaced(part, factor, dtype):
    model = with_zero_output(make("llama").to(dtype))
    odd = getattr(model.model.layers[0], part)
    multiplied(odd, factor)
    assert odd not in replacements(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero_output", [True, False])
@pytest.mark.parametrize("part", ["self_attn", "mlp"])
def test_faulty_sum_under_a_large_residual_is_not_replaced(part, zero_output, dtype):
    model = make("llama").to(dtype)
    layer = with_zero_output(model).model.layers[0] if zero_output else model.model.layers[0]

    class Weighted(type(layer)):
        """Halves what one module adds, by a hook that its replacement does not see."""

        def forward(self, hidden_states, **kwargs):
            module = getattr(self, part)
            handle = module.register_forward_hook(
                lambda _, __, out: (out[0] * 0.5, *out[1:]) if isinstance(out, tuple) else out * 0.5
            )
            try:
                return super().forward(hidden_states, **kwargs)
            finally:
                handle.remove()

    layer.__class__ = Weighted
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1000)
    assert layer not in replacements(model)


def test_fuse_uses_no_memory_and_keeps_parameters():
    model = make("qwen2")
    before = {name: (id(parameter), parameter.clone()) for name, parameter in model.named_parameters()}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    undo = fuse(model)

    def storages():
        return {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}

    assert sum(storages().values()) == sum(p.numel() * p.element_size() for p in model.parameters())
    assert len(storages()) < len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert (id(parameter), True) == (before[name][0], torch.equal(parameter, before[name][1]))
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    undo()
    assert len(storages()) == len(list(model.parameters()))


@pytest.mark.compat
def test_fused_model_is_saved_and_loaded(tmp_path):
    model = make("llama")
    plain = copy.deepcopy(model)
    fuse(model)
    model.save_pretrained(tmp_path / "fused")
    plain.save_pretrained(tmp_path / "plain")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("fused", "plain")]
    assert sizes[0] == sizes[1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fused")
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    torch.save(model.state_dict(), tmp_path / "state.pt")
    plain.load_state_dict(torch.load(tmp_path / "state.pt"))


@pytest.mark.parametrize("change", ["load", "assign", "double", "copy", "train"])
def test_weights_may_change_after_fuse(change):
    model, other = make("llama", seed=0), make("llama", seed=1)
    fuse(model)
    logits_over_branches(model, fused)
    if change == "load":
        model.load_state_dict(other.state_dict())
    elif change == "assign":
        model.load_state_dict(other.state_dict(), assign=True)
    elif change == "double":
        model.to(torch.float64).to(torch.float32)
    elif change == "copy":
        model = copy.deepcopy(model)
        assert (
            joined([p.weight for p in (model.model.layers[0].mlp.gate_proj, model.model.layers[0].mlp.up_proj)]) is None
        )
    else:
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
        optimiser.step()
    torch.testing.assert_close(
        logits_over_branches(model, fused), logits_over_branches(model), atol=1e-5, rtol=1e-5
    )  # fmt: skip


class Adapter(nn.Module):
    """A low-rank update around a linear layer, as adapters are loaded."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.low = nn.Linear(base_layer.in_features, 2, bias=False)
        self.high = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.high(self.low(x))


@pytest.mark.parametrize("part", ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"])
def test_adapters_loaded_after_fuse_take_effect(part):
    model = make("llama")
    fuse(model)
    without = logits_over_branches(model, fused)
    parent, name = part.split(".")
    owner = getattr(model.model.layers[0], parent)
    torch.manual_seed(0)
    setattr(owner, name, Adapter(getattr(owner, name)))
    got, expected = logits_over_branches(model, fused), logits_over_branches(model)
    assert (expected - without).abs().max() > 1e-3
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("part", ["self_attn", "self_attn.k_proj", "mlp.gate_proj", "input_layernorm", "mlp"])
def test_hooks_are_called_and_obeyed(part):
    model = make("llama")
    fuse(model)
    calls = []

    def hook(module, args, output):
        calls.append(module)
        return (output[0] * 2, *output[1:]) if isinstance(output, tuple) else output * 2

    model.model.layers[1].get_submodule(part).register_forward_hook(hook)
    expected = logits_over_branches(model)
    calls.clear()
    torch.testing.assert_close(logits_over_branches(model, fused), expected, atol=1e-5, rtol=1e-5)
    assert calls


def test_hidden_states_under_kernels():
    model = make("llama")
    fuse(model)
    call = dict(input_ids=torch.tensor([[5, 9, 3]]), output_hidden_states=True)
    with torch.no_grad():
        expected = model(**call).hidden_states
        with fused(model):
            got = model(**call).hidden_states
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


def test_exception_restores_the_model():
    model = make("llama")
    forwards = {module: module.forward for module in model.modules()}
    hooks = len(model._forward_pre_hooks)
    with pytest.raises(KeyError), fused(model):
        assert any("forward" in module.__dict__ for module in model.modules())
        raise KeyError
    assert {module: module.forward for module in model.modules()} == forwards
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert (model.config._attn_implementation, len(model._forward_pre_hooks)) == ("sdpa", hooks)


def test_shared_parameters_stay_shared():
    model = make("llama")
    first, second = (layer.mlp for layer in model.model.layers)
    second.gate_proj.weight, second.up_proj.weight = first.gate_proj.weight, first.up_proj.weight
    fuse(model)
    assert second.gate_proj.weight is first.gate_proj.weight
    torch.testing.assert_close(logits_over_branches(model, fused), logits_over_branches(model), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not INTERPRETED, reason="under the interpreter only")
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "olmo2", "glm4", "cohere2", "granite", "gpt-neox"])
def test_kernel_in_a_model(family):
    model = make(family)
    fuse(model)
    expected = logits_over_branches(model)
    torch.testing.assert_close(logits_over_branches(model, fused), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("family", [*DENSE, "gpt-oss"])
def test_fused_model_on_a_gpu(family):
    model = make(family).to("cuda")
    expected = logits_over_branches(model, device="cuda")
    fuse(model)
    got = logits_over_branches(model, fused, device="cuda")
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_captured_forward_reads_the_mask_at_each_replay():
    model = make("llama").to("cuda")
    fuse(model)
    ids = torch.tensor([[5, 9, 3]], device="cuda")
    mask = torch.ones((1, 1, 3, 3), dtype=torch.bool, device="cuda").tril()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), fused(model), torch.cuda.stream(stream):
        model(ids, attention_mask=mask, use_cache=False)
        graph.capture_begin()
        logits = model(ids, attention_mask=mask, use_cache=False).logits
        graph.capture_end()
    for hidden in (0, 1):
        mask[0, 0, 2, hidden] = False
        stream.wait_stream(torch.cuda.current_stream())
        graph.replay()
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_fuse_needs_extra_memory_for_one_group_of_weights():
    model = make("llama")
    for layer in model.model.layers:
        layer.mlp.gate_proj, layer.mlp.up_proj = nn.Linear(1024, 4096, bias=False), nn.Linear(1024, 4096, bias=False)
        layer.mlp.down_proj = nn.Linear(4096, 1024, bias=False)
    model.to("cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fuse(model)
    assert torch.cuda.memory_allocated() <= before
    assert torch.cuda.max_memory_allocated() - before <= 2 * 4096 * 1024 * 4 + (1 << 20)


def test_captured_stage_is_split_once_after_its_second_layer():
    model, ids, events = make("llama"), torch.arange(1, 5)[None], []
    watched = [layer.register_forward_hook(lambda *_: events.append("layer")) for layer in model.model.layers]
    with torch.no_grad(), fused(model):
        model(ids)  # examines the model; nothing is captured yet
        events.clear()
        with split_graph(lambda: events.append("split")):
            model(ids)
            model(ids)
        model(ids)
    number = len(watched)
    assert number >= 2 and events == ["layer", "split", "layer"] + ["layer"] * (3 * number - 2)
