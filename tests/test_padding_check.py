"""What the check of padded batches remembers when it could not compare anything."""

import copy
import threading

import pytest
import torch

from hf_specbranch import padding_check
from hf_specbranch.kept_checks import load_check
from hf_specbranch.padding_check import CHECK

from .models import attached, prompt


@pytest.fixture(autouse=True)
def kept(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_SPECBRANCH_CACHE", str(tmp_path))


def padded(rows=2):
    inputs = prompt(rows, length=6)
    inputs["attention_mask"][0, :3] = 0
    return inputs


def generate(model, **settings):
    return model.generate(**padded(), max_new_tokens=6, do_sample=False, pad_token_id=0, **settings)


def failing(model, error, times):
    """Let the next passes of a model fail."""
    model.generate(**prompt(), max_new_tokens=1)  # whatever else is checked
    failures = []

    def fail(*_):
        if len(failures) < times:
            failures.append(error)
            raise error

    model.register_forward_pre_hook(fail)
    return failures


def test_lack_of_memory_is_not_remembered(target):
    """Not in this process either: the batch is left to transformers, and the next one is checked."""
    model = attached(copy.deepcopy(target))
    failures = failing(model, torch.OutOfMemoryError("none"), times=1)
    expected = generate(target)
    assert torch.equal(generate(model), expected) and model.specbranch_stats is None and failures
    assert torch.equal(generate(model), expected) and model.specbranch_stats is not None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("none"), RuntimeError("an accident")])
def test_check_that_compared_nothing_is_not_kept_on_disk(error, target):
    model = attached(copy.deepcopy(target))
    failures = failing(model, error, times=1)
    padding_check.reads_padding_as_plain(model)
    model._forward_pre_hooks.clear()
    assert failures and load_check(model, CHECK) is None


def test_interrupted_check_is_made_again(target, monkeypatch):
    model = attached(copy.deepcopy(target))
    with monkeypatch.context() as patch:
        patch.setattr(padding_check, "_passes", lambda model: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            padding_check.reads_padding_as_plain(model)
    checks, passes = [], padding_check._passes
    monkeypatch.setattr(padding_check, "_passes", lambda model: checks.append(model) or passes(model))
    assert padding_check.reads_padding_as_plain(model) and checks


def test_other_thread_waits_for_no_check_of_this_one(target, monkeypatch):
    """It makes the check itself: that of this thread may still fail."""
    model, found = attached(copy.deepcopy(target)), []

    def differs(_model):
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=lambda: found.append(padding_check.reads_padding_as_plain(model)))
            other.start()
            other.join()
        return False

    monkeypatch.setattr(padding_check, "_passes", differs)
    assert padding_check.reads_padding_as_plain(model) is False and found == [False]


def test_another_attention_is_checked_by_itself(target, monkeypatch):
    model, checks = attached(copy.deepcopy(target)), []
    monkeypatch.setattr(padding_check, "load_check", lambda *_: None)
    monkeypatch.setattr(padding_check, "_passes", lambda model: not checks.append(1))
    for attention in ("sdpa", "eager", "sdpa"):
        model.set_attn_implementation(attention)
        assert padding_check.reads_padding_as_plain(model)
    assert len(checks) == 2
