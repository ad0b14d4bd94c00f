"""Random greedy generations equal plain `generate()`; see `tests/fuzz.py`, which also runs by itself."""

import os

import pytest
import torch

from . import fuzz

CASES = int(os.environ.get("SPECBRANCH_FUZZ_CASES", "10"))


@pytest.mark.compat
@pytest.mark.matrix
def test_random_cases_equal_plain_generate():
    found = [fuzz.check(seed=0, number=number)[0] for number in range(CASES)]
    assert not any(found), next(filter(None, found))


@pytest.mark.slow
def test_many_random_cases_equal_plain_generate():
    found = [fuzz.check(seed=1, number=number)[0] for number in range(1000)]
    assert not any(found), next(filter(None, found))


@pytest.mark.compat
@pytest.mark.matrix
def test_random_cases_of_recurrent_models_equal_plain_generate():
    found = [fuzz.check(seed=0, number=number, families=fuzz.RECURRENT)[0] for number in range(CASES // 3)]
    assert not any(found), next(filter(None, found))


@pytest.mark.slow
def test_many_random_cases_of_recurrent_models_equal_plain_generate():
    found = [fuzz.check(seed=1, number=number, families=fuzz.RECURRENT)[0] for number in range(1000)]
    assert not any(found), next(filter(None, found))


def test_a_difference_is_found():
    """A target whose weights are not those of the plain one."""
    case = next(case for number in range(99) if not (case := fuzz.make_case(0, number)).turns[1:])
    plain, model, _ = fuzz.pair(case.family, case.draft)
    weights = model.get_output_embeddings().weight
    kept = weights.detach().clone()
    try:
        with torch.no_grad():
            weights.neg_()
        assert "expected" in fuzz.run_case(case)
    finally:
        weights.data.copy_(kept)
    assert fuzz.run_case(case) == ""


def test_cases_are_repeatable():
    assert fuzz.describe(fuzz.make_case(3, 7))[:400] == fuzz.describe(fuzz.make_case(3, 7))[:400]
    assert fuzz.describe(fuzz.make_case(3, 7)) != fuzz.describe(fuzz.make_case(3, 8))
