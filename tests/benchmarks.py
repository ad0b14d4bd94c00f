"""A tiny pair, and a benchmark of all methods on it."""

import copy

from hf_specbranch import specbranch
from hf_specbranch.bench.measure import Benchmark, Plan
from hf_specbranch.bench.methods import METHODS, Overrides, Pair, check_names

from .heads import random_head
from .models import prompt
from .releases import ASSISTED_FAILS

NEW_TOKENS = 8
RUNNABLE = [name for name in METHODS if name != "assisted" or not ASSISTED_FAILS]


def tiny_pair(target, draft):
    return Pair(specbranch(copy.deepcopy(target)), copy.deepcopy(draft), None, random_head(target, draft))


def benchmark_of_all_methods(pair, *progress, **plan):
    """All methods on two prompts; it is still to be run."""
    prompts = [(f"p{length}", prompt(length=length, seed=length)) for length in (7, 12)]
    plan = Plan(
        check_names(tuple(RUNNABLE)), Overrides(max_draft_length=4), NEW_TOKENS, sweep=(1, 3), sweep_prompts=1, **plan
    )
    return Benchmark(pair, prompts, plan, *progress)
