"""Grown models compute what the small ones compute, and impossible growth is refused with a reason."""

from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_specbranch import load_demo_pair, specbranch
from hf_specbranch.bench import NAMED_SHAPES, Shape, grow
from hf_specbranch.bench.shapes import SHAPES
from hf_specbranch.bench.twin import check_twin, make_twin

from .models import slowly

# Every dimension larger than in `small()`: width, layers, heads, MLP and head size.
LARGER = Shape(192, 5, 12, 12, 200, head_dim=32)


def small(kv_heads: int = 4, tied: bool = True, **changes: object) -> LlamaForCausalLM:
    """A Llama of 64 dimensions whose random weights are large enough for logits of size ten."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes))).eval()


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    ids = torch.randint(128, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kv_heads", [slowly(1), 2, slowly(4)])
def test_growing_all_dimensions_keeps_the_logits(kv_heads: int, tied: bool) -> None:
    model = small(kv_heads, tied)
    torch.testing.assert_close(logits(grow(model, LARGER)), logits(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(64, 2, 4, 4, 96),
        Shape(128, 2, 4, 4, 96, head_dim=16),
        Shape(64, 6, 4, 4, 96, head_dim=16),
        Shape(64, 2, 4, 4, 160, head_dim=16),
        Shape(64, 2, 12, 6, 96, head_dim=16),
        Shape(64, 2, 4, 4, 96, head_dim=64),
    ],
    ids=["nothing", "width", "layers", "mlp", "heads", "head_dim"],
)
def test_growing_one_dimension_keeps_the_logits(shape: Shape) -> None:
    model = small(kv_heads=2)
    torch.testing.assert_close(logits(grow(model, shape)), logits(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_growing_to_grouped_queries_keeps_the_logits(kv_heads: int) -> None:
    model = small(kv_heads)
    grouped = Shape(256, 3, 24, 4, 128, head_dim=32)  # six queries per key-value head; "33b" has seven
    torch.testing.assert_close(logits(grow(model, grouped)), logits(model), atol=1e-4, rtol=0)


def test_grown_demo_target_gives_the_same_text() -> None:
    target, _, tokenizer = load_demo_pair()
    inputs = tokenizer("def add(a, b):\n", return_tensors="pt")
    grown = grow(target, Shape(320, 12, 12, 12, 1000, head_dim=64))
    args = {"do_sample": False, "max_new_tokens": 64, "min_new_tokens": 64}
    assert torch.equal(grown.generate(**inputs, **args), target.generate(**inputs, **args))


def test_last_hidden_states_are_kept() -> None:
    model, ids = small(), torch.arange(20)[None]
    grown = grow(model, Shape(96, 5, 6, 6, 128, head_dim=16))
    with torch.no_grad():
        old = model(input_ids=ids, output_hidden_states=True).hidden_states
        new = grown(input_ids=ids, output_hidden_states=True).hidden_states
    for depth in (2, 3):  # from the end; the last entry is normalised
        torch.testing.assert_close(new[-depth][..., :64], old[-depth], atol=1e-4, rtol=0)
        assert not new[-depth][..., 64:].any()


def test_free_weights_are_random() -> None:
    grown = grow(small(), LARGER)
    added, kept = grown.model.layers[0], grown.model.layers[-1]
    for layer in (added, kept):
        free = [layer.self_attn.q_proj, layer.self_attn.v_proj, layer.mlp.gate_proj, layer.mlp.up_proj]
        assert all(bool((module.weight != 0).all()) for module in free)
    assert bool((grown.lm_head.weight != 0).all())


@pytest.mark.slow
def test_growing_to_bfloat16() -> None:
    model = small()
    grown = grow(model, LARGER, dtype=torch.bfloat16)
    assert grown.dtype == torch.bfloat16
    error = (logits(grown).float() - logits(model)).abs().mean() / logits(model).abs().mean()
    assert error < 0.05


def test_growing_keeps_the_small_model() -> None:
    model = small()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    grow(model, LARGER)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert model.config.hidden_size == 64


QUICK = ("68m", "target"), ("7b", "good draft"), ("33b", "weak draft")
GROWN = [(name, which) for name in NAMED_SHAPES for which in ("target", "good draft", "weak draft")]


@pytest.mark.parametrize(("name", "which"), [each if each in QUICK else slowly(*each) for each in GROWN])
def test_demo_models_fit_every_named_shape(which: str, name: str) -> None:
    target, good, _ = load_demo_pair()
    model = {"target": target, "good draft": good, "weak draft": load_demo_pair("weak")[1]}[which]
    if which == "target" and name == "68m":
        with pytest.raises(ValueError, match="num_hidden_layers 2, the model has 10"):
            grow(model, name, device="meta")
    else:
        assert grow(model, name, device="meta").config.hidden_size == NAMED_SHAPES[name].hidden_size


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("68m", 0.019), ("7b", 6.48)),
        *(slowly(*each) for each in (("160m", 0.113), ("1b", 0.97), ("1.3b", 1.22), ("13b", 12.7), ("33b", 32.9))),
    ],
)
def test_named_shapes_have_real_sizes(name: str, billions: float) -> None:
    _, draft, _ = load_demo_pair()
    layers = grow(draft, name, device="meta").model.layers
    assert sum(p.numel() for p in layers.parameters()) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(48, 2, 4, 4, 96, head_dim=16), "hidden_size 48, the model has 64"),
        (Shape(64, 1, 4, 4, 96), "num_hidden_layers 1, the model has 2"),
        (Shape(64, 2, 2, 2, 96, head_dim=32), "num_attention_heads 2, the model has 4"),
        (Shape(64, 2, 4, 4, 95), "intermediate_size 95, the model has 96"),
        (Shape(64, 2, 4, 4, 96, head_dim=8), "head_dim 8, the model has 16"),
        (Shape(96, 2, 4, 4, 96), "head_dim 24 of the shape is no multiple of the model's 16"),
        (Shape(64, 2, 8, 2, 96, head_dim=16), "2 key-value heads of 4 queries each; the model's 4 .* need 4"),
    ],
)
def test_unreachable_shape_is_refused(shape: Shape, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grow(small(), shape)


def test_indivisible_heads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_key_value_heads \(3\) does not divide num_attention_heads \(8\)"):
        Shape(64, 2, 8, 3, 96)
    with pytest.raises(ValueError, match=r"num_attention_heads \(6\) does not divide hidden_size \(64\)"):
        Shape(64, 2, 6, 6, 96)


def test_unknown_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown shape '70b': use one of 68m, 160m, 1b"):
        grow(small(), "70b")


def test_other_architecture_is_refused() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=128))
    with pytest.raises(TypeError, match="takes a LlamaForCausalLM, got GPT2LMHeadModel"):
        grow(gpt2, "7b")


def test_scaled_rotary_needs_the_same_head_size() -> None:
    model = small(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(ValueError, match="rope_type 'linear'"):
        grow(model, LARGER)
    wider = Shape(96, 3, 6, 6, 128, head_dim=16)
    torch.testing.assert_close(logits(grow(model, wider)), logits(model), atol=1e-4, rtol=0)


def test_biases_are_refused() -> None:
    with pytest.raises(ValueError, match="attention_bias"):
        grow(small(attention_bias=True), LARGER)


PAIRS = ("llama3.1-8b:llama3.2-1b", "qwen2.5-7b:qwen2.5-0.5b", "qwen3-8b:qwen3-0.6b", "qwen3-30b-a3b:qwen3-0.6b")
# Sizes that make the named architectures small: more than those of `small()`.
SIZES = {
    "llama3.2-1b": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32},
    "qwen2.5-0.5b": {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 448},  # two heads share one
    "qwen3-8b": {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64},
    "qwen3-30b-a3b": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "moe_intermediate_size": 40,
                      "num_experts": 12, "num_experts_per_tok": 4},
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_twins_of_real_models_keep_the_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {**SHAPES[name].figures, "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 4}
    figures |= {"vocab_size": 300, **SIZES[name]}
    monkeypatch.setitem(SHAPES, name, replace(SHAPES[name], figures=figures))
    model = small()
    twin = make_twin(model, name)
    assert twin.config.model_type == SHAPES[name].model_type and twin.config.vocab_size == 300
    assert twin.config.tie_word_embeddings == figures["tie_word_embeddings"]
    expected, got = logits(model), logits(twin)
    torch.testing.assert_close(got[..., :128], expected, atol=2e-4, rtol=0)
    assert got[..., 128:].max() < -50
    if "moe" in twin.config.model_type:
        chosen: list[torch.Tensor] = []
        twin.model.layers[-1].mlp.gate.register_forward_hook(lambda *call: chosen.append(call[2][-1]))
        logits(twin)
        assert len(set((chosen[0][:, 0] // 4).tolist())) > 1  # tokens choose different experts


def test_every_named_pair_has_twins() -> None:
    target, draft, _ = load_demo_pair()
    for model, name in ((each, name) for pair in PAIRS for each, name in zip((target, draft), pair.split(":"))):
        check_twin(model, name)
    with pytest.raises(ValueError, match="unknown shape 'gpt-oss-20b'"):
        check_twin(target, "gpt-oss-20b")
    with pytest.raises(ValueError, match="key-value heads"):
        check_twin(small(kv_heads=14, num_attention_heads=14, hidden_size=112), "qwen2.5-0.5b")


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS)
def test_twins_of_real_models_on_a_gpu(pair: str) -> None:
    (small_target, small_draft, tokenizer), (first, second) = load_demo_pair(), pair.split(":")
    inputs = tokenizer("def add(a, b):\n    return", return_tensors="pt").to("cuda")
    with torch.no_grad():
        expected = small_draft(inputs.input_ids.cpu()).logits
        got = make_twin(small_draft, second, torch.float32, "cuda")(inputs.input_ids).logits.cpu()
    torch.testing.assert_close(got[..., :4096], expected, atol=2e-3, rtol=0)
    target, draft = (
        make_twin(*each, torch.bfloat16, "cuda") for each in ((small_target, first), (small_draft, second))
    )
    text = specbranch(target, draft).generate(**inputs, max_new_tokens=64, do_sample=False)
    stats = target.specbranch_stats
    assert int(text.max()) < 4096
    assert stats.runtime == "graph" and not stats.slowed_by
    assert stats.mean_acceptance_length > 1.5
