"""Recordings, costs and plans that the tests of the planner share."""

from dataclasses import asdict
from functools import lru_cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specbranch import SpecBranchConfig, load_demo_pair
from hf_specbranch.bench import NAMED_SHAPES
from hf_specbranch.planning.agreement import Agreement, read_agreement, record_agreement
from hf_specbranch.planning.chooser import plans_within
from hf_specbranch.planning.costs import StepCosts

ALWAYS = Agreement((0.95,) * 97, (0,) * 97, 5, ((0.95, 0.02, 0.01, 0.01, 0.01),) * 97)
NEVER = Agreement((0.3,) * 97, (-1,) * 97, 5, ((0.3, 0.2, 0.1, 0.1, 0.1),) * 97)
PAPER = SpecBranchConfig().decided(captured=True)
CHEAP_DRAFT = StepCosts(0.004, 2e-5, 1e-4, 1e-6, hidden=0.8)


def every_plan():
    return plans_within(SpecBranchConfig(), captured=True)


def of_size(name, vocabulary=32000):
    """A model on the meta device: it has sizes, but no weights."""
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**asdict(NAMED_SHAPES[name]), vocab_size=vocabulary)).to(torch.bfloat16)


@lru_cache
def recordings(which, temperature=0.0):
    """Recordings of an embedded draft on a few texts of the target."""
    target, draft, tokenizer = load_demo_pair(which)
    texts = ("def add(a, b):", "class Stack:\n", "def is_prime(n):\n", "import json\n\ndef read(path):\n")
    all_inputs = [tokenizer(text, return_tensors="pt") for text in texts]
    if not temperature:
        return [record_agreement(target, draft, inputs, 80, 5) for inputs in all_inputs]
    torch.manual_seed(0)
    sampling = dict(do_sample=True, temperature=temperature, top_k=0, max_new_tokens=80)
    lengths = [inputs["input_ids"].shape[1] for inputs in all_inputs]
    written = [target.generate(**inputs, **sampling) for inputs in all_inputs]
    return [read_agreement(draft, text, before, 5, temperature) for text, before in zip(written, lengths)]


def from_token(agreement, first, last=None):
    some = slice(first, last)
    confidence, rank, chances, lookups = (
        each[some] for each in (agreement.confidence, agreement.rank, agreement.chances, agreement.lookups)
    )
    return Agreement(confidence, rank, 5, chances, lookups)
