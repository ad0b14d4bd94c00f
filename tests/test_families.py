"""Slots and masks give architectures the logits of plain runs; `test_families_sweep.py` compares whole texts."""

import pytest
import torch

from hf_specbranch.runtime.eager import EagerRunner
from hf_specbranch.runtime.mask_probe import mask_maker_for

from .families import FAMILIES, VOCABULARY, make
from .models import attached, prompt


@pytest.mark.compat
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_packed_branches_have_the_logits_of_plain_runs(family):
    """A prefix and two branches of three tokens, written to random slots of one row."""
    model = make(family)
    prefix, one, two = torch.randint(3, VOCABULARY, (14,)).split([8, 3, 3])
    runner = EagerRunner(model, mask_maker_for(model, "target"))
    order = torch.randperm(30)
    places, slots_one, slots_two = order[:8], order[8:11], order[11:14]
    runner.reserve(1, 30)
    packed = torch.cat([prefix, one, two])
    positions = torch.cat([torch.arange(8), torch.arange(8, 11), torch.arange(8, 11)])
    slots = torch.cat([places, slots_one, slots_two])
    visible = torch.zeros((1, 14, 30), dtype=torch.bool)
    for query in range(14):
        visible[0, query, places[: query + 1]] = True
    for j in range(3):
        visible[0, 8 + j, slots_one[: j + 1]] = True
        visible[0, 11 + j, slots_two[: j + 1]] = True
    logits = runner.forward(packed[None], positions[None], slots[None], visible).logits[0]
    for branch, rows in ((one, slice(8, 11)), (two, slice(11, 14))):
        plain = model(torch.cat([prefix, branch])[None]).logits[0, -3:]
        torch.testing.assert_close(logits[rows], plain, atol=1e-5, rtol=1e-4)


def test_families_may_be_mixed():
    target, draft = make("qwen3"), make("gpt2")
    inputs = prompt(2, vocabulary=VOCABULARY)
    expected = target.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert torch.equal(
        attached(target).generate(**inputs, max_new_tokens=20, do_sample=False, assistant_model=draft), expected
    )
