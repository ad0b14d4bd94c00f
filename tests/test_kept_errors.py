"""What the self-checks of modules have found is kept on disk, and a new process need not compare them again."""

import copy
import functools

import pytest
import torch
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from hf_specbranch.kept_checks import files_in, load_check
from hf_specbranch.layers import angles, check, fused
from hf_specbranch.layers.fuse import CHECK
from hf_specbranch.layers.kept_errors import KeptErrors
from hf_specbranch.model_state import state_of

from .families import make

FAMILIES = ["llama", "gemma2", "qwen2-moe", "gpt-neox"]


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_SPECBRANCH_CACHE", str(tmp_path))
    return tmp_path / "checks"


@pytest.fixture
def comparisons(monkeypatch):
    """How often a module is compared."""
    counted, distance = [], check._distance

    def count(*args):
        counted.append(args)
        return distance(*args)

    monkeypatch.setattr(check, "_distance", count)
    return counted


def replaced(model):
    """Return what runs in place of which module."""
    with fused(model):
        pass
    names = {module: name for name, module in model.named_modules()}
    replacements = state_of(model).kernel_recipe.replacements
    return {names[module]: type(replacement) for module, replacement in replacements.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_model_is_not_compared_again(family, comparisons):
    expected = replaced(make(family))
    assert expected and comparisons
    comparisons.clear()
    again = make(family)
    assert replaced(again) == expected and not comparisons
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        plain = again(tokens).logits
        with fused(again):
            torch.testing.assert_close(again(tokens).logits, plain, atol=1e-5, rtol=1e-5)


def test_module_that_differs_is_not_replaced_by_a_later_process_either(comparisons):
    def broken():
        model = make("llama")
        model.model.layers[1].mlp.act_fn = torch.nn.Sigmoid()
        return model

    expected = replaced(broken())
    assert "model.layers.0.mlp" in expected and "model.layers.1.mlp" not in expected
    comparisons.clear()
    assert replaced(broken()) == expected


def test_other_weights_are_compared(comparisons):
    model = make("llama")
    replaced(copy.deepcopy(model))
    comparisons.clear()
    with torch.no_grad():
        model.model.embed_tokens.weight[0, 0] += 1
    replaced(model)
    assert comparisons


def test_modules_with_a_hook_are_compared(comparisons):
    """They are not replaced, so checks compare other modules than those that the errors on disk are about."""
    expected = replaced(make("llama"))
    comparisons.clear()
    model = make("llama")
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *_: None)
    assert replaced(model).keys() < expected.keys() and comparisons


def test_lack_of_memory_is_not_kept(monkeypatch):
    model, distance, failures = make("llama"), check._distance, []

    def fail_once(*args):
        if not failures:
            failures.append(args)
            raise torch.OutOfMemoryError
        return distance(*args)

    monkeypatch.setattr(check, "_distance", fail_once)
    replaced(model)
    assert failures and load_check(model, CHECK) is None


@pytest.mark.parametrize("family, passes", [("llama", 0), ("gemma2", 0), ("qwen2-moe", 1)])
def test_equal_model_is_not_run_again(family, passes, monkeypatch):
    """Only what routers return must be known: a mixture is run once."""
    expected = replaced(make(family))
    model, runs, call = make(family), [], torch.nn.Module.__call__

    def count(module, *args, **kwargs):
        runs.extend([1] * (module is model))
        return call(module, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "__call__", count)
    assert replaced(model) == expected and len(runs) == passes


def test_rotary_angles_of_an_equal_model_are_not_computed_again(monkeypatch):
    expected = replaced(make("llama"))

    def fail(*_):
        raise RuntimeError("computed again")

    monkeypatch.setattr(angles, "_outputs", fail)
    assert replaced(make("llama")) == expected and "model.rotary_emb" in expected


def other_forward(patch):
    own = modeling_llama.LlamaAttention.forward
    patch.setattr(modeling_llama.LlamaAttention, "forward", lambda *args, **kwargs: (2 * own(*args, **kwargs)[0], None))


def wrapped_forward(patch):
    own = modeling_llama.LlamaMLP.forward
    patch.setattr(modeling_llama.LlamaMLP, "forward", functools.wraps(own)(lambda *args: 2 * own(*args)))


def other_function(patch):
    own = modeling_llama.apply_rotary_pos_emb
    patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, *args: own(2 * q, *args))


def other_product_of_attention(patch):
    own = torch.nn.functional.scaled_dot_product_attention
    patch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *args, **kwargs: 2 * own(*args, **kwargs))


def doubled(*args, **kwargs):
    return 2 * ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)[0], None


def other_attention(patch):
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    patch.setitem(
        ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *args, **kwargs: (2 * own(*args, **kwargs)[0], None)
    )


CHANGES = [other_forward, wrapped_forward, other_function, other_product_of_attention, other_attention]


def error_of_logits(model):
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad(), fused(model):
        ours = model(tokens).logits
    with torch.no_grad():
        plain = model(tokens).logits
    return float((ours - plain).abs().max() / plain.abs().max())


@pytest.mark.parametrize("change", CHANGES)
def test_replaced_code_of_the_library_is_compared(change, monkeypatch):
    """The names of classes and of the attention are those of the model whose errors are on disk."""
    replaced(make("llama"))
    change(monkeypatch)
    assert load_check(model := make("llama"), CHECK) is None and error_of_logits(model) < 1e-4


def test_attention_that_a_user_has_registered_is_compared(monkeypatch):
    """It has the same name in a later process, and may be another one."""

    def model():
        made = make("llama")
        made.set_attn_implementation("registered")
        return made

    monkeypatch.setitem(AttentionInterface._global_mapping, "registered", ALL_ATTENTION_FUNCTIONS["sdpa"])
    replaced(model())
    monkeypatch.setitem(AttentionInterface._global_mapping, "registered", doubled)
    assert error_of_logits(model()) < 1e-4


def test_model_with_hooks_is_compared(comparisons):
    replaced(make("llama"))
    comparisons.clear()
    (model := make("llama")).register_forward_pre_hook(lambda *_: None)
    replaced(model)
    assert comparisons


def test_model_of_which_more_was_kept_is_examined_by_itself():
    """A module that is no longer there was called."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert KeptErrors(model, {"errors": [{"0": 0.5}], "called": ["0"]}).earlier
    assert not KeptErrors(model, {"errors": [{"0": 0.5}], "called": ["0", "1"]}).earlier


@pytest.mark.parametrize("errors", [None, 3, {}, [3], [{"": "0"}], [{"": None}]])
@pytest.mark.parametrize("called", [None, [], [0]])
def test_damaged_errors_are_ignored(errors, called):
    model = torch.nn.Linear(2, 2)
    for earlier in (errors, {"errors": errors, "called": called}):
        assert KeptErrors(model, earlier).look_up([model]) is None


def test_errors_of_other_modules_are_ignored_from_there_on():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    first, second = model
    kept = KeptErrors(model, {"errors": [{"0": 0.5}, {"1": 0.25}, {"0": 0.125}], "called": ["0", "1"]})
    assert kept.look_up([first]) == {first: 0.5}
    assert kept.look_up([first, second]) is None and not kept.earlier
    kept.add({first: 1.0, second: 2.0})
    assert kept.look_up([first]) is None and kept.found == [{"0": 0.5}, {"0": 1.0, "1": 2.0}]


def test_plans_of_products_are_among_the_files_of_this_package(tmp_path):
    """They decide which kernels run."""
    for name in ("kernels/products.json", "kernels/linear.py", "README.md"):
        (file := tmp_path / name).parent.mkdir(exist_ok=True)
        file.write_text("one")
    assert {name for name, _, _ in files_in(str(tmp_path))} == {"kernels/products.json", "kernels/linear.py"}
