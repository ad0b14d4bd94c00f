"""Models with recurrent layers run captured: the same tokens, and states at addresses that do not change."""

import copy
import gc
from dataclasses import replace

import pytest
import torch

from hf_specbranch.layers import fuse, fused
from hf_specbranch.layers.decoder_layer import LayerForward
from hf_specbranch.layers.delta_net import DeltaNetForward
from hf_specbranch.layers.storage import joined
from hf_specbranch.model_state import state_of
from hf_specbranch.runtime.recurrent_cache import RecurrentCache
from hf_specbranch.runtime.recurrent_modules import owners_of

from .fuzz import RECURRENT
from .kernels import DEVICE, where_triton_runs
from .models import config, pairs, slowly
from .test_recurrent import ENDS, KINDS, assert_equal, attached_pair, plain_model

DELTA_NETWORKS = ["qwen3_next", "qwen3_5_text"]


def addresses(model):
    """Where the idle runner of a model keeps states."""
    (cache,) = [runner.cache for runner in state_of(model).idle_runners]
    assert isinstance(cache, RecurrentCache)
    kept = [memory for _, layer in cache.recurrent_layers() for memory in (*layer.kept.values(), *layer.states())]
    tensors = [each[1] if isinstance(each, tuple) else each for each in kept]
    return [tensor.data_ptr() for tensor in (cache.history.slots, *tensors)]


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("qwen3_next", "pearl"),
        slowly("mamba2", "specbranch"),
        slowly("qwen3_5_text", "vanilla"),
        slowly("falcon_h1", "pearl"),
    ],
)
def test_captured_stages_equal_plain_generate(name, policy, graph_runners):
    plain, model, draft = attached_pair(name)
    settings, found = config(policy, gamma=3, epsilon=0.0, kernels=True), []
    for length in (9, 7, 9):  # the last text has the rounds of the first
        inputs = torch.arange(3 * length).view(3, length) % 37 + 3
        given = {"input_ids": inputs, "attention_mask": inputs > 4, "eos_token_id": ENDS}
        assert_equal(plain, model, draft, replace(settings, runtime="eager"), **given)
        accepted = model.specbranch_stats.num_accepted_tokens
        assert_equal(plain, model, draft, settings, **given)
        assert model.specbranch_stats.num_accepted_tokens == accepted > 0  # the states of the draft are right, too
        found.append((model.specbranch_stats.graphs_captured, addresses(model), addresses(draft)))
    assert model.specbranch_stats.runtime == "graph" and not model.specbranch_stats.slowed_by
    assert found[0][0] > 0 == found[2][0] and found[0][1:] == found[1][1:] == found[2][1:]
    assert "spans" in state_of(model).kernel_checks.values()
    # Longer drafts need more states: they move, and what was captured is captured again.
    settings = config(policy, gamma=9, epsilon=0.0, kernels=True)
    assert_equal(plain, model, draft, settings, eos_token_id=ENDS)
    assert addresses(model) != found[1][1] and model.specbranch_stats.graphs_captured > 0


@pytest.mark.compat
@pytest.mark.parametrize("name", DELTA_NETWORKS)
def test_delta_networks_are_replaced(name):
    model = copy.deepcopy(plain_model(name))
    fuse(model)
    layers = model.model.layers
    networks = [layer.linear_attn for layer in layers if hasattr(layer, "linear_attn")]
    with torch.no_grad(), fused(model):
        assert all(isinstance(network.forward.ours, DeltaNetForward) for network in networks)
        assert sum(isinstance(getattr(layer.forward, "ours", None), LayerForward) for layer in layers) == len(layers)
    for network in networks:
        inputs = [layer.weight for name, layer in network.named_children() if name.startswith("in_proj")]
        assert joined(sorted(inputs, key=lambda weight: weight.data_ptr())) is not None


@pytest.mark.compat
def test_positions_on_several_axes():
    """Axes that share their memory are those of a text, and our kernel computes their angles; the module joins others.

    In some releases of transformers this module takes nothing but positions on three axes.
    """
    model, calls = copy.deepcopy(plain_model("qwen3_5_text")), []
    module, x, axes = model.model.rotary_emb, torch.ones(1, 5, 1), torch.arange(15).view(3, 1, 5)
    given = axes[1].expand(3, 1, 5), axes
    expected = [module(x, each) for each in given]

    class Counted(type(module)):
        def forward(self, x, position_ids):
            calls.append(position_ids)
            return super().forward(x, position_ids)

    module.__class__ = Counted
    with torch.no_grad(), fused(model):
        calls.clear()
        torch.testing.assert_close([module(x, each) for each in given], expected)
    assert len(calls) == 1 and calls[0] is axes


@pytest.mark.parametrize(("part", "name"), pairs(["dt_bias", "norm", "conv1d"], DELTA_NETWORKS))
def test_faulty_delta_network_is_not_replaced(name, part):
    """One that computes with something else than its parameters."""
    model = copy.deepcopy(plain_model(name))
    network = next(layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn"))
    own = type(network).forward
    changed = network.dt_bias if part == "dt_bias" else getattr(network, part).weight

    class Odd(type(network)):
        def forward(self, *args, **kwargs):
            kept = changed.data
            changed.data = kept * 1.5 + 0.5
            try:
                return own(self, *args, **kwargs)
            finally:
                changed.data = kept

    network.__class__ = Odd
    assert network not in owners_of(model).replacements
    with torch.no_grad(), fused(model):
        assert not isinstance(getattr(network.forward, "ours", None), DeltaNetForward)


def inputs_of(length):
    inputs = (torch.arange(3 * length).view(3, length) * 7) % 37 + 3
    return {"input_ids": inputs, "attention_mask": inputs > 4, "eos_token_id": ENDS}


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("policy", ["autoregressive", "vanilla", "pearl", "specbranch", "auto"])
@pytest.mark.parametrize("name", [*DELTA_NETWORKS, "falcon_h1", "mamba2", "lfm2"])
def test_captured_on_a_gpu(name, policy, kernels, caplog):
    plain, model, draft = (each.to("cuda") for each in attached_pair(name))
    settings = config(policy, gamma=4, epsilon=0.0, kernels=kernels)
    for length in (7, 12, 9):  # the second and third reuse caches and graphs
        assert_equal(plain, model, draft, settings, **inputs_of(length))
        stats = model.specbranch_stats
        found = stats.runtime, stats.slowed_by, state_of(model).kernel_checks, caplog.messages
        if name == "qwen3_next" and stats.runtime == "eager":
            # torch's grouped product may wait for the device in float32, and passes over many tokens need it.
            assert "synchroniz" in stats.slowed_by and stats.slowed_by in caplog.text, found
        else:
            assert stats.runtime == "graph" and not stats.slowed_by, found
    uses = state_of(model).kernel_checks.values()
    assert not kernels or stats.runtime == "eager" or set(uses) == {"spans"}, found  # captured with our kernels


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("name", [name for name in RECURRENT if name not in (*KINDS, *DELTA_NETWORKS)])
def test_other_families_are_captured_or_say_why_not(name, kernels, caplog):
    plain, model, draft = (each.to("cuda") for each in attached_pair(name))
    settings = config("vanilla", gamma=4, epsilon=0.0, kernels=kernels)
    for length in (7, 12):
        assert_equal(plain, model, draft, settings, **inputs_of(length))
        stats = model.specbranch_stats
        assert (stats.runtime == "graph") != bool(stats.slowed_by), (stats.runtime, stats.slowed_by, caplog.messages)


@where_triton_runs
def test_row_that_ends_while_the_next_round_is_in_flight(request):
    """The next round begins after its whole draft, which was accepted; then the row goes back to its end."""
    if not torch.cuda.is_available():
        request.getfixturevalue("graph_runners")
    plain, model, draft = (each.to(DEVICE) for each in attached_pair("olmo_hybrid"))
    settings = config("vanilla", gamma=4, epsilon=0.0, kernels=True, runtime="graph")
    assert_equal(plain, model, draft, settings, max_new_tokens=8, **inputs_of(7))
    assert model.specbranch_stats.runtime == "graph" and not model.specbranch_stats.slowed_by


class CollectingLinear(torch.nn.Linear):
    """Collects garbage during a capture, if Python may."""

    def forward(self, x):
        if x.is_cuda and torch.cuda.is_current_stream_capturing() and gc.isenabled():
            gc.collect()
        return super().forward(x)


@pytest.mark.gpu
def test_garbage_does_not_end_the_trial_of_a_capture(caplog):
    """Graphs and caches of a model that is garbage are released between captures, not in one."""
    settings, threshold = config("vanilla", gamma=4, epsilon=0.0, kernels=False, runtime="graph"), gc.get_threshold()
    first, second = ([each.to("cuda") for each in attached_pair("falcon_h1")] for _ in range(2))
    second[1].lm_head.__class__ = CollectingLinear
    try:
        gc.set_threshold(0)  # nothing is collected by itself
        assert_equal(*first, settings, **inputs_of(7))
        first.append(first)
        del first
        assert_equal(*second, settings, **inputs_of(7))
    finally:
        gc.set_threshold(*threshold)
    stats = second[1].specbranch_stats
    assert stats.runtime == "graph" and not stats.slowed_by, (stats.slowed_by, caplog.messages)
