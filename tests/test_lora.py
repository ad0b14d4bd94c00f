"""LoRA on the fast path: captured once per set of adapters, through the kernels, with the texts of plain generate()."""

import copy

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hf_specbranch import specbranch
from hf_specbranch.kernels.backend import INTERPRETED
from hf_specbranch.kernels.gated import gated_reference
from hf_specbranch.kernels.linear import Partials, Plan
from hf_specbranch.kernels.lora import lora_fits, lora_gated_product, lora_product, lora_reference
from hf_specbranch.kernels.low_rank import LowRank
from hf_specbranch.layers.attention import AttentionForward
from hf_specbranch.layers.fuse import fuse, fused
from hf_specbranch.layers.lora import low_rank, terms_of
from hf_specbranch.layers.mlp import MlpForward
from hf_specbranch.layers.products import LoraProduct
from hf_specbranch.layers.storage import joined
from hf_specbranch.model_state import state_of

from .graphs import Comparison, tokens
from .kernels import DEVICE, DTYPES, assert_close, on_kernels, randn
from .models import llama, noisy_copy, slowly

peft = pytest.importorskip("peft")
# PEFT 0.21 reads a property that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing. is deprecated:FutureWarning")
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHORT = {"policy": "vanilla", "new_tokens": 8}


def lora(seed, targets=ALL, rank=4, scale=8, **changes):
    torch.manual_seed(seed)
    return peft.LoraConfig(r=rank, lora_alpha=scale * rank, target_modules=targets, init_lora_weights=False, **changes)


def adapted(model, *configs):
    """Return a PEFT model around a copy, with adapters "0", "1", ..., the first of them active."""
    wrapped = peft.get_peft_model(copy.deepcopy(model), configs[0], adapter_name="0")
    for number, each in enumerate(configs[1:], start=1):
        wrapped.add_adapter(str(number), each)
    return wrapped.eval()


class Pair(Comparison):
    """A plain PEFT model and its twin under SpecBranch."""

    def each(self, change):
        for model in (self.plain, self.model):
            change(model)

    def captures(self, ids):
        """Generate with both and compare; return how many graphs were captured."""
        self(ids)
        assert self.stats.runtime == "graph"
        return self.stats.graphs_captured


@pytest.fixture
def pair(target, draft, graph_runners):
    return Pair(adapted(target, lora(1), lora(2, ["q_proj", "v_proj"], rank=2)), draft, **SHORT)


def activate(*names):
    return lambda model: model.base_model.set_adapter(list(names))


def scale_up(model):
    for name, parameter in model.named_parameters():
        if "lora_B.0" in name:
            parameter.data.mul_(1.5)


def test_switching_back_captures_nothing(pair):
    ids, texts = tokens(9), []
    for names in (("0",), ("1",), ("0", "1")):
        pair.each(activate(*names))
        assert pair.captures(ids)
        texts.append(str(pair(ids)))
    with pair.plain.disable_adapter(), pair.model.disable_adapter():
        assert pair.captures(ids)
        texts.append(str(pair(ids)))
    assert len(set(texts)) == 4
    for names in (("0",), ("0", "1"), ("1",)):
        pair.each(activate(*names))
        assert pair.captures(ids) == 0
    with pair.plain.disable_adapter(), pair.model.disable_adapter():
        assert pair.captures(ids) == 0


def test_adapter_weights_changed_in_place_take_effect(pair):
    ids = tokens(9)
    before = pair(ids)
    pair.each(scale_up)
    assert pair.captures(ids) == 0 and not torch.equal(pair(ids), before)


def test_adapters_added_and_deleted_leave_graphs_of_others_valid(pair):
    ids = tokens(9)
    pair.captures(ids)
    pair.each(lambda model: model.add_adapter("new", lora(3)))
    assert pair.captures(ids) == 0
    pair.each(activate("new"))
    assert pair.captures(ids)
    pair.each(activate("0"))
    pair.each(lambda model: model.delete_adapter("new"))
    assert pair.captures(ids) == 0
    pair.each(lambda model: model.add_adapter("new", lora(4)))  # another adapter of the same name
    pair.each(activate("new"))
    pair(ids)


def test_merged_adapters(pair):
    ids = tokens(9)
    unmerged = pair(ids)
    pair.each(lambda model: model.merge_adapter())
    assert pair.captures(ids) and torch.equal(pair(ids), unmerged)
    with pair.plain.disable_adapter(), pair.model.disable_adapter():  # the first pass unmerges them
        pair.captures(ids)
    assert pair.captures(ids) == 0


def test_another_scaling_is_another_set_of_adapters(pair):
    ids = tokens(9)
    before = pair(ids)

    def rescale(model):
        for module in model.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("0", 2.0)

    pair.each(rescale)
    assert pair.captures(ids) and not torch.equal(pair(ids), before)


def test_adapters_of_transformers_are_captured(target, draft, graph_runners):
    model = copy.deepcopy(target)
    model.add_adapter(lora(1), adapter_name="0")
    model.add_adapter(lora(2), adapter_name="1")
    pair, ids = Pair(model.eval(), draft, **SHORT), tokens(9)
    for name in "01":
        pair.each(lambda each, name=name: each.set_adapter(name))
        assert pair.captures(ids)
    pair.each(lambda each: each.disable_adapters())
    assert pair.captures(ids)
    pair.each(lambda each: each.enable_adapters())
    for name in "10":
        pair.each(lambda each, name=name: each.set_adapter(name))
        assert pair.captures(ids) == 0


def test_no_prefix_of_another_adapter_is_reused(graph_runners):
    target = llama(seed=0, max_position_embeddings=2048)
    pair = Pair(adapted(target, lora(1), lora(2)), noisy_copy(target, 0.25, 1), 4, policy="vanilla")
    ids = pair(tokens(1100))
    assert pair.reused(ids) > 1000
    pair.each(activate("1"))
    assert pair.reused(ids) == 0
    pair.each(activate("0"))
    assert pair.reused(ids) > 1000
    pair.each(scale_up)
    assert pair.reused(ids) == 0


@pytest.mark.parametrize(
    "changes", [{"use_dora": True}, *map(slowly, ({"lora_bias": True}, {"use_rslora": True}))], ids=str
)
def test_forms_of_lora(target, draft, graph_runners, changes):
    pair = Pair(adapted(target, lora(1, **changes)), draft, **SHORT)
    assert pair.captures(tokens(9)) and pair.captures(tokens(9, seed=1)) == 0


# ---- layers


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids).logits


def replacements(model, kind):
    with fused(model):
        recipe = state_of(model).kernel_recipe
    return [each for each in recipe.replacements.values() if isinstance(each, kind)]


@pytest.mark.parametrize("targets", [ALL, ["q_proj", "v_proj"], ["k_proj", "up_proj", "o_proj"]], ids=len)
def test_layers_with_lora_run_through_the_kernels(target, targets):
    wrapped = adapted(target, lora(1, targets), lora(2, targets, rank=3))
    model, ids = wrapped.get_base_model(), tokens(11)
    undo = fuse(model)
    attention = model.model.layers[0].self_attn
    layers = [getattr(each, "base_layer", each) for each in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert joined([layer.weight for layer in layers]) is not None
    found = [*replacements(model, AttentionForward), *replacements(model, MlpForward)]
    assert len(found) == 4 and any(isinstance(each.inputs, LoraProduct) for each in found)
    for names in (("0",), ("1",), ("1", "0")):
        activate(*names)(wrapped)
        with fused(model):
            got = logits_of(model, ids)
        torch.testing.assert_close(got, logits_of(model, ids), rtol=1e-4, atol=1e-4)
    with wrapped.disable_adapter(), fused(model):
        torch.testing.assert_close(logits_of(model, ids), logits_of(target, ids), rtol=1e-4, atol=1e-4)
    undo()


@pytest.mark.parametrize("other", ["dora", "ia3"])
def test_layers_with_unknown_adapters_stay_replaced(target, other):
    config = lora(1, ["q_proj", "down_proj"], use_dora=True)
    if other == "ia3":
        config = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], init_ia3_weights=False)
    model, ids = adapted(target, config).get_base_model(), tokens(11)
    assert len(replacements(model, AttentionForward)) == len(replacements(model, MlpForward)) == 2
    with fused(model):
        got = logits_of(model, ids)
    torch.testing.assert_close(got, logits_of(model, ids), rtol=1e-4, atol=1e-4)


def test_dropout_of_a_model_in_training_is_kept(target):
    model, ids = adapted(target, lora(1, lora_dropout=0.5)).get_base_model(), tokens(11)
    model.train()
    with fused(model):
        assert not torch.equal(logits_of(model, ids), logits_of(model, ids))


# ---- kernels


CASES = (  # columns and first column of each layer with an adapter, of 136 columns; rows; rank
    ((70, 33, 33), (0, 70, 103), 3, 16),
    ((70, 33), (0, 103), 20, 5),
    ((33,), (70,), 1, 40),
    ((70, 33, 33), (0, 70, 103), 1, 20),
)
adapter_dtypes = st.sampled_from([torch.float32, DTYPES[-1]])


def operands(case, dtype, adapter_dtype, biased, depth=1280):
    columns, starts, rows, rank = case
    torch.manual_seed(0)
    x, weight = randn(rows, depth, dtype=dtype), randn(136, depth, dtype=dtype) / depth**0.5
    terms = LowRank(
        downs=tuple(randn(rank, depth, dtype=adapter_dtype) / depth**0.5 for _ in columns),
        ups=tuple(randn(size, rank, dtype=adapter_dtype) for size in columns),
        scales=tuple(0.5 + index for index in range(len(columns))),
        starts=starts,
    )
    return x, weight, randn(136, dtype=dtype) if biased else None, terms


@on_kernels
@given(st.sampled_from(DTYPES[1:]), adapter_dtypes, st.sampled_from(CASES), st.booleans(), st.sampled_from([1, 2, 8]))
@example(torch.float16, torch.float32, CASES[0], False, 2)
@example(torch.float16, torch.float16, CASES[1], True, 1)
@example(torch.float16, torch.float32, CASES[2], True, 8)
@example(torch.float16, torch.float32, CASES[3], False, 2)
def test_kernel_lora(dtype, adapter_dtype, case, biased, splits):
    asked, plan = operands(case, dtype, adapter_dtype, biased), Plan(splits, 3)
    assert lora_fits(*asked, plan)
    got = lora_product(*asked, plan)
    if isinstance(got, Partials):  # sums in float32, before they are rounded
        expected = lora_reference(asked[0].float(), *asked[1:])
        torch.testing.assert_close(got.terms.sum(0), expected, rtol=1e-4, atol=1e-4)
        got = got.sum()
    assert_close(got, lora_reference(*asked))


@on_kernels
@given(st.sampled_from(DTYPES[1:]), adapter_dtypes, st.booleans(), st.sampled_from(["silu", "gelu_tanh"]))
@example(torch.float16, torch.float32, True, "silu")
def test_kernel_lora_gated(dtype, adapter_dtype, biased, activation):
    for case in (((68, 68), (0, 68), 3, 16), ((68,), (68,), 20, 8), ((68, 68), (0, 68), 1, 33)):
        asked = operands(case, dtype, adapter_dtype, biased)
        expected = gated_reference(lora_reference(*asked), activation)
        assert_close(lora_gated_product(*asked, Plan(1, 3), activation), expected)


@torch.no_grad()
def test_kernel_lora_in_a_model():
    """The kernels run in a whole model, with adapters of which some layers have none."""
    if not (INTERPRETED or torch.cuda.is_available()):
        pytest.skip("needs CUDA or the interpreter")
    for targets in (ALL, ["q_proj", "v_proj", "up_proj"]):
        small = llama(seed=0, hidden=128, layers=1, sharpness=1).to(torch.float16)
        model, ids = adapted(small, lora(1, targets, rank=8)).get_base_model().to(DEVICE), tokens(5, device=DEVICE)
        fuse(model)
        (mlp,) = replacements(model, MlpForward)
        x = randn(3, 128, dtype=torch.float16)
        terms = low_rank([terms_of(layer) for layer in mlp.inputs.layers], mlp.inputs.sizes)
        assert lora_fits(x, *mlp.inputs.base._as_one(), terms, Plan(1, 3))
        exact = logits_of(copy.deepcopy(model).float(), ids)
        with fused(model):
            got = logits_of(model, ids)
        assert (got - exact).norm() <= 1.5 * (logits_of(model, ids) - exact).norm()


# ---- on a GPU


@pytest.fixture(scope="module")
def large():
    """A model whose products the kernels take, in bfloat16, with adapters in float32.

    The adapters are smaller than the weights, as trained ones are. PEFT rounds what they add three times.
    """
    model = llama(seed=0, hidden=256, layers=3).to(torch.bfloat16)
    return adapted(model, lora(1, rank=16, scale=2), lora(2, ["q_proj", "v_proj"], rank=8, scale=2))


@pytest.mark.gpu
@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", [("0",), ("1",), ("0", "1"), ()], ids="+".join)
def test_logits_of_lora_on_a_gpu(large, names, adapter_dtype):
    """On average over texts. The error of one text in bfloat16 is chance: attention is sharp in these models."""
    wrapped, texts = copy.deepcopy(large).cuda(), [tokens(13, seed, device="cuda") for seed in range(12)]
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(adapter_dtype)
    model = wrapped.get_base_model()
    fuse(model)
    activate(*names)(wrapped) if names else wrapped.base_model.disable_adapter_layers()
    exact = copy.deepcopy(model).float()

    def errors():
        return torch.stack([(logits_of(model, ids) - logits_of(exact, ids)).norm() for ids in texts])

    own = errors()
    with torch.no_grad(), fused(model):
        ours = errors()
    assert (ours / own).log().mean().exp() <= 1.2
    assert len(replacements(model, AttentionForward)) == 3


@pytest.mark.gpu
def test_adapters_are_switched_on_a_gpu(large):
    model = specbranch(copy.deepcopy(large).cuda(), draft=noisy_copy(large.get_base_model(), 0.1, 1).cuda())
    ids = tokens(9, device="cuda")

    def generate(names):
        activate(*names)(model)
        text = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        assert model.specbranch_stats.runtime == "graph"
        return text, model.specbranch_stats.graphs_captured

    sets = (("0",), ("1",), ("0", "1"))
    first = [generate(names) for names in sets]
    assert all(captured for _, captured in first) and len({str(text) for text, _ in first}) == 3
    for names, (text, _) in zip(sets, first):
        again, captured = generate(names)
        assert torch.equal(again, text) and captured == 0
