"""Compiled decoder layers: the same logits, compiled once for all layers and shapes, and no trace left behind."""

import copy
import gc
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as tf

from hf_specbranch.kernels import fused, interface
from hf_specbranch.kernels.attention_override import original_attention
from hf_specbranch.runtime import compiled
from hf_specbranch.runtime.compiled import FOLDER, compiled_layers, decoder_layers, lasting_folder
from hf_specbranch.runtime.eager import EagerRunner
from hf_specbranch.runtime.kv_cache import SlotCache
from hf_specbranch.runtime.mask_probe import mask_maker_for

from .families import FAMILIES, make
from .models import attached

PROMPT = 20
TRACED, BUILT = "aot_eager", "inductor"  # the second builds kernels, which takes long on a CPU
LOG = "hf_specbranch.runtime.compiled"


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """A kernel cache of our own, empty at first."""
    folder = tmp_path_factory.mktemp("inductor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        yield folder


@pytest.fixture(autouse=True)
def counters():
    from torch._dynamo.utils import counters

    counters.clear()
    return counters


def llama(layers=2, seed=0):
    torch.manual_seed(seed)
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    settings = tf.LlamaConfig(vocab_size=64, num_hidden_layers=layers, max_position_embeddings=256, **sizes)
    return tf.LlamaForCausalLM(settings).eval()


def started(model, rows=1):
    """A runner that has read a prompt."""
    runner = EagerRunner(model, mask_maker_for(model, "target"))
    prompt = (torch.arange(PROMPT)[None] + torch.arange(rows)[:, None]) % 60 + 1
    with torch.no_grad():
        runner.prefill(prompt, torch.arange(PROMPT).expand(rows, -1), None)
    return runner


def step(runner, queries, shown=256, rows=1, **extra):
    """A chain of `queries` tokens behind the prompt, written to scattered slots."""
    tokens = (torch.arange(queries)[None] + torch.arange(rows)[:, None]) % 50 + 3
    positions = torch.arange(PROMPT, PROMPT + queries).expand(rows, -1)
    slots = (PROMPT + torch.arange(queries) * 37 % 200).expand(rows, -1).clone()
    visible = torch.zeros((rows, queries, shown), dtype=torch.bool)
    visible[:, :, :PROMPT] = True
    for query in range(queries):
        visible[:, query, slots[0, : query + 1]] = True
    runner.reserve(rows, shown)
    with torch.no_grad():
        return runner.forward(tokens, positions, slots, visible, **extra)


def assert_same_compiled(runner, *size, backend=TRACED, **how):
    plain = step(runner, *size, **how)
    with compiled_layers(runner.model, backend):
        compiled = step(runner, *size, **how)
    torch.testing.assert_close(compiled.logits, plain.logits, atol=1e-5, rtol=0)


def state_of(model):
    """Everything a module's instance holds, by identity."""
    return [{name: id(value) for name, value in module.__dict__.items()} for module in model.modules()]


def test_compiled_layers_give_the_same_logits_and_are_compiled_once_for_all_layers(counters, caplog):
    runner = started(llama(layers=6))
    random_state = torch.get_rng_state()
    before = state_of(runner.model)
    with caplog.at_level(logging.WARNING, logger=LOG):
        assert_same_compiled(runner, 5)
        assert_same_compiled(runner, 3)
    assert counters["stats"]["unique_graphs"] == 1
    assert not [record for record in caplog.records if record.name == LOG]
    assert torch.equal(torch.get_rng_state(), random_state)
    assert state_of(runner.model) == before


def test_the_model_is_as_it_was_after_an_error():
    model = llama()
    before, weights = state_of(model), set(model.state_dict())
    with pytest.raises(KeyboardInterrupt), compiled_layers(model):
        assert "forward" in model.model.layers[0].__dict__
        assert set(model.state_dict()) == weights
        raise KeyboardInterrupt
    assert state_of(model) == before
    pickle.loads(pickle.dumps(model))


def test_contexts_of_one_model_may_overlap():
    model = llama()
    outer, inner = compiled_layers(model), compiled_layers(model)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert "forward" in model.model.layers[0].__dict__
    inner.__exit__(None, None, None)
    assert "forward" not in model.model.layers[0].__dict__


def test_prefill_and_training_run_as_always(counters):
    model = llama()
    runner = EagerRunner(model, mask_maker_for(model, "target"))
    ids = torch.arange(6)[None] + 1
    plain = model(ids).logits
    with compiled_layers(model):
        runner.prefill(ids, torch.arange(6)[None], None)
        assert torch.equal(model(ids).logits, plain)
        model(ids).logits.sum().backward()
    assert runner.cache.get_seq_length() == 6
    assert counters["stats"]["unique_graphs"] == 0


class Undecided(torch.nn.Module):
    """Asks a tensor for its value, which no compiler can know."""

    def forward(self, states):
        return states if states.sum().item() > 1e9 else states + 1.0


def test_what_cannot_be_compiled_runs_as_always_and_says_why_once(caplog):
    model = llama()
    model.model.layers[1].mlp = Undecided()
    runner = started(model)
    with caplog.at_level(logging.WARNING, logger=LOG):
        assert_same_compiled(runner, 5)
        assert_same_compiled(runner, 1)
    (record,) = [record for record in caplog.records if record.name == LOG]
    assert "LlamaForCausalLM runs without torch.compile: " in record.message
    assert "data-dependent" in record.message
    assert "\n" not in record.message


def test_layers_that_another_library_wraps_are_left_alone(caplog):
    model = llama()
    model.model.layers[0].forward = model.model.layers[0].forward
    before = state_of(model)
    with caplog.at_level(logging.WARNING, logger=LOG), compiled_layers(model):
        assert state_of(model) == before
    assert "another library" in caplog.text
    assert state_of(model) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_of_every_family_is_found(family):
    model = make(family)
    assert list(decoder_layers(model).values()) == [0, 1]


def test_kernels_are_kept_where_the_user_says_or_beside_the_hugging_face_cache(monkeypatch, tmp_path):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setattr("hf_specbranch.runtime.compiled.HF_HOME", str(tmp_path))
    monkeypatch.setenv(FOLDER, "/chosen/by/the/user")
    assert lasting_folder() is None
    ours = tmp_path / "hf_specbranch" / "inductor"
    monkeypatch.setenv(FOLDER, default_cache_dir())  # as Inductor itself leaves it
    assert lasting_folder() == ours
    monkeypatch.delenv(FOLDER)
    assert lasting_folder() == ours
    monkeypatch.setattr("hf_specbranch.runtime.compiled.HF_HOME", os.devnull)
    assert lasting_folder() is None


@pytest.mark.slow
@pytest.mark.compat
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral-sliding", "gemma2", "phi3", "gpt2", "gpt-oss", "llama-eager"]
)
def test_every_family_gives_the_same_logits_compiled(family, counters, caplog):
    runner = started(make(family))
    with caplog.at_level(logging.WARNING, logger=LOG):
        for queries, shown in [(9, 256), (1, 256), (4, 512), (1, 1024)]:
            assert_same_compiled(runner, queries, shown, backend=BUILT)
    assert not [record for record in caplog.records if record.name == LOG]
    assert counters["stats"]["unique_graphs"] == 2  # one query, several


@pytest.mark.slow
def test_new_shapes_are_not_compiled_anew(counters):
    runner = started(llama())
    runner.reserve(1, 4096)
    for shown in (256, 512, 2048):
        for queries in (9, 1, 2, 4, 8, 32, 64):
            assert_same_compiled(runner, queries, shown)
    assert counters["stats"]["unique_graphs"] == 2
    several = started(runner.model, rows=3)
    for queries in (9, 1, 2, 4):
        assert_same_compiled(several, queries, rows=3)
    assert counters["stats"]["unique_graphs"] == 4


@pytest.mark.slow
def test_hidden_states_are_collected_around_compiled_layers(counters):
    runner = started(llama())
    plain = step(runner, 5, output_hidden_states=True).hidden_states
    with compiled_layers(runner.model, TRACED):
        compiled = step(runner, 5, output_hidden_states=True).hidden_states
        step(runner, 5)
    for one, other in zip(plain, compiled, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_an_empty_cache_is_filled_on_the_way(counters):
    model = llama()
    runner = started(model)
    plain = step(runner, 5).logits
    entries = [(layer.keys[:, :, :PROMPT], layer.values[:, :, :PROMPT]) for layer in runner.cache.layers]
    runner.cache = SlotCache()
    with compiled_layers(model, TRACED):
        step(runner, 5)
        for layer, (keys, values) in zip(runner.cache.layers, entries, strict=True):
            layer.keys[:, :, :PROMPT], layer.values[:, :, :PROMPT] = keys, values
        torch.testing.assert_close(step(runner, 5).logits, plain, atol=1e-5, rtol=0)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_another_thread_may_run_the_layers(counters):
    runner = started(llama())
    plain, found = step(runner, 5).logits, []
    with compiled_layers(runner.model, TRACED):
        thread = threading.Thread(target=lambda: found.append(step(runner, 5).logits))
        thread.start()
        thread.join()
    torch.testing.assert_close(found[0], plain, atol=1e-5, rtol=0)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_a_compiled_model_can_be_freed():
    runner = started(llama())
    assert_same_compiled(runner, 5)
    model = weakref.ref(runner.model)
    copy.deepcopy(runner.model)
    del runner
    gc.collect()
    assert model() is None


SECOND_PROCESS = """
import json, torch
torch.set_num_threads(1)
from torch._dynamo.utils import counters
from tests import test_compiled as tests
tests.assert_same_compiled(tests.started(tests.llama(layers=3)), 5, backend=tests.BUILT)
print(json.dumps(counters["aot_autograd"]))
"""


@pytest.mark.slow
def test_a_second_process_finds_the_kernels_on_disk(folder):
    assert_same_compiled(started(llama()), 5, backend=BUILT)
    output = subprocess.run([sys.executable, "-c", SECOND_PROCESS], capture_output=True, text=True, check=True).stdout
    found = json.loads(output.splitlines()[-1])
    assert found.get("autograd_cache_hit") == 1 and "autograd_cache_miss" not in found


@pytest.fixture
def asked(monkeypatch):
    """Queries of each call of our attention from compiled layers, on a machine that seems to have Triton.

    The kernel is not there: the operation takes the way it takes for what its kernel cannot do.
    """
    asked = []
    monkeypatch.setattr(compiled, "serves", lambda device: True)
    monkeypatch.setattr(interface, "fits", lambda query, *_: bool(asked.append(query.shape[2])))
    return asked


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("queries", [1, 5])
def test_layers_call_our_attention_as_one_operation(queries, attention, asked):
    model = llama().to(torch.bfloat16)
    model.set_attn_implementation(attention)
    runner = started(model)
    plain = step(runner, queries).logits.float()
    for ours in (False, True):
        asked.clear()
        with compiled_layers(model, TRACED, our_attention=ours):
            assert (model.config._attn_implementation != attention) == ours
            assert original_attention(model.config) == attention
            got = step(runner, queries).logits.float()
        assert asked.count(queries) == (2 if ours else 0)  # once a layer
        assert (got - plain).norm() <= 2e-2 * plain.norm()
    assert model.config._attn_implementation == attention and not interface.one_pass.active


def test_what_is_known_of_a_mask_is_forgotten_with_every_pass(asked, monkeypatch):
    forgotten = []
    monkeypatch.setattr(interface.one_pass, "forget", lambda: forgotten.append(1))
    runner = started(llama().to(torch.bfloat16))
    with compiled_layers(runner.model, TRACED, our_attention=True):
        before = len(forgotten)
        step(runner, 1)
        step(runner, 1)
        assert len(forgotten) == before + 2


def test_while_layers_are_compiled_another_thread_may_begin_a_generation(asked):
    model, draft = attached(llama().to(torch.bfloat16)), llama(seed=1).to(torch.bfloat16)
    kwargs = dict(input_ids=torch.arange(1, 9)[None], max_new_tokens=8, do_sample=False)
    with ThreadPoolExecutor(1) as pool, compiled_layers(model, TRACED, our_attention=True):
        got = pool.submit(model.generate, **kwargs, assistant_model=draft).result()
    assert got.shape == (1, 16)


def test_whoever_leaves_last_puts_the_attention_back(asked):
    model = make("gpt-neox").to(torch.bfloat16)
    for contexts in ([compiled_layers(model, TRACED, our_attention=True), fused(model)], [fused(model), fused(model)]):
        for context in contexts:
            context.__enter__()
        contexts[0].__exit__(None, None, None)
        assert model.config._attn_implementation != "sdpa"
        contexts[1].__exit__(None, None, None)
        assert model.config._attn_implementation == "sdpa"


def test_where_every_attention_has_a_stand_in_nobody_asks_for_another(asked):
    model = llama().to(torch.bfloat16)
    with fused(model):
        assert model.config._attn_implementation == "sdpa"
    with compiled_layers(model, TRACED, our_attention=True):
        with fused(model):
            pass
        assert model.config._attn_implementation != "sdpa"


def test_an_interrupt_while_layers_are_opened_leaves_no_trace(asked, monkeypatch):
    model = llama().to(torch.bfloat16)
    real = compiled.registered_attention

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(compiled, "registered_attention", interrupted)
    with pytest.raises(KeyboardInterrupt), compiled_layers(model, TRACED, our_attention=True):
        pass
    monkeypatch.setattr(compiled, "registered_attention", real)
    assert "forward" not in model.model.layers[0].__dict__ and model.config._attn_implementation == "sdpa"
    with compiled_layers(model, TRACED, our_attention=True):
        assert "forward" in model.model.layers[0].__dict__ and model.config._attn_implementation != "sdpa"


def test_a_compiled_model_with_our_attention_can_be_trained():
    """By a user who asked for it: nothing of ours is open."""
    interface.register()
    model, expected = llama().train(), llama().train()
    model.set_attn_implementation("specbranch")
    ids = torch.arange(1, 13).view(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    for run in (expected, torch.compile(model, backend=TRACED)):
        run(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    for got, wanted in zip(model.parameters(), expected.parameters()):
        assert torch.allclose(got.grad, wanted.grad, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_that_operation_does_what_it_tells_the_compiler(softcap, sinks, added):
    """Sizes and strides of its result, that it changes nothing it is given, and what it computes."""
    torch.manual_seed(0)
    query, cache = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 10, 8)
    mask = torch.rand(2, 1, 3, 10) < 0.7
    mask[..., 0] = True
    if added:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    given = query, cache, cache, mask, 0.3, softcap, torch.randn(4) if sinks else None
    torch.library.opcheck(interface._compiled_attention, given)
    expected = interface.attend_reference(*given)
    assert torch.allclose(interface._compiled_attention(*given), expected, atol=1e-6)
