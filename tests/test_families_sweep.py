"""Every architecture is equal to plain `generate()`, or refused before any work; and the sweep notices if not."""

from collections import Counter

import pytest
import torch
import transformers
from transformers import GPT2LMHeadModel
from typer.testing import CliRunner

from hf_specbranch.cli import app
from hf_specbranch.families.check import (
    EQUAL,
    ERROR,
    NEAR_TIE,
    NEW_TOKENS,
    REFUSED,
    WRONG,
    compare,
    image_prompts,
    is_refusal,
)
from hf_specbranch.families.sweep import Result, markdown, sweep, try_family
from hf_specbranch.families.tiny import VOCABULARY, Family, language_models, vision_models

FAILED = (WRONG, ERROR, NEAR_TIE)
TEXT = ("gpt_oss", "deepseek_v3", "bert", "gemma3_text", "llama", "qwen2", "gpt2")  # each attends in its own way
IMAGES = ("llava", "gemma3", "gemma4", "smolvlm")
SEVERAL_AXES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def family(name: str) -> Family:
    return next(each for each in (*language_models(), *vision_models()) if each.name == name)


def in_words(result: Result) -> str:
    return "\n".join(f"{case.policy}, {case.inputs}: {case.state} {case.note}" for case in result.cases)


def first_quick(names, quick=1):
    """All names, those after the first few for the slow tests."""
    return [*names[:quick], *(pytest.param(name, marks=pytest.mark.slow) for name in names[quick:])]


@pytest.mark.parametrize("name", first_quick(TEXT))
def test_text_is_equal(name):
    result = try_family(family(name))
    assert {case.state for case in result.cases} == {EQUAL}, in_words(result)
    assert {case.inputs for case in result.cases} == {"one row", "padded batch"}
    # The comparison means something: drafts are accepted, and rejected.
    drafted = [case.accepted for case in result.cases if case.policy != "autoregressive"]
    assert any(drafted) and min(drafted) < 1


@pytest.mark.compat
@pytest.mark.matrix
@pytest.mark.parametrize("name", first_quick(IMAGES))
def test_texts_and_images_are_equal(name):
    result = try_family(family(name))
    assert {case.state for case in result.cases} == {EQUAL}, in_words(result)
    assert {case.inputs for case in result.cases} == {"one row", "padded batch", "one image", "batch of images"}


@pytest.mark.compat
@pytest.mark.matrix
@pytest.mark.parametrize("name", first_quick(SEVERAL_AXES))
def test_positions_of_several_axes_are_equal_or_refused(name):
    result = try_family(family(name))
    assert {case.state for case in result.cases} <= {EQUAL, REFUSED}, in_words(result)
    assert {case.inputs for case in result.cases} == {"one row", "padded batch", "one image", "batch of images"}


def test_images_are_seen():
    """Prompts that differ in their pixels alone have different logits."""
    for name in (*IMAGES, *SEVERAL_AXES):
        model = family(name).build()
        prompts = image_prompts(model, 1)
        with torch.no_grad():
            one = model(**prompts).logits
            other = model(**{**prompts, "pixel_values": 1 - prompts["pixel_values"]}).logits
        assert (one - other)[:, -1].abs().max() > 1e-3, name


# ---- the sweep can fail


class Exchanged(GPT2LMHeadModel):
    """Plain `generate()` writes another token near the end of the second row."""

    def _sample(self, *args, **kwargs):
        output = super()._sample(*args, **kwargs)
        if len(output.sequences) > 1:
            output.sequences[1, -3] = (output.sequences[1, -3] + 1) % VOCABULARY
        return output


def test_a_wrong_architecture_is_found():
    result = try_family(Family("exchanged", "Exchanged", lambda: Exchanged))
    assert result.state == WRONG, in_words(result)
    assert {case.inputs for case in result.cases if case.state == WRONG} == {"padded batch"}
    assert result.note.startswith(f"row 1, new token {NEW_TOKENS - 3}: ")
    assert "## Wrong\n" in markdown([result]) and "1 wrong" in markdown([result])


def test_the_first_difference_and_near_ties_are_told():
    logits = torch.tensor([[[0.0, 3.0, 1.0], [0.0, 2.0, 1.99999]]])
    expected = torch.tensor([[5, 1, 1]])
    assert compare(expected, expected, logits)[0] == EQUAL
    assert compare(torch.tensor([[5, 1, 2]]), expected, logits)[0] == NEAR_TIE
    state, note = compare(torch.tensor([[5, 2, 2]]), expected, logits)
    assert state == WRONG and note.startswith("row 0, new token 0: 2 in place of 1")
    assert compare(torch.tensor([[5, 1]]), expected, logits)[0] == WRONG


def test_only_our_own_errors_are_refusals(target):
    def caught(act):
        with pytest.raises(Exception) as found:
            act()
        return found.value

    from hf_specbranch import SpecBranchConfig

    assert is_refusal(caught(lambda: SpecBranchConfig(policy="no such policy")))
    assert not is_refusal(caught(lambda: target(input_ids=None)))  # a ValueError of transformers
    assert not is_refusal(caught(lambda: SpecBranchConfig(no_such_setting=1)))


def test_the_command_names_what_it_tried(tmp_path):
    page = tmp_path / "families.md"
    done = CliRunner().invoke(app, ["families", "gpt_neox", "rwkv", "--markdown", str(page)])
    assert done.exit_code == 0, done.output
    assert "2 architectures, 0 wrong" in done.output
    text = page.read_text()
    assert "| gpt_neox | `GPTNeoXForCausalLM` | equal |" in text
    assert "| rwkv | `RwkvForCausalLM` | refused |" in text and "recurrent state" in text
    with pytest.raises(ValueError, match="no architecture is called no_such_model"):
        list(sweep(["no_such_model"]))


# ---- everything


@pytest.mark.slow
@pytest.mark.compat
@pytest.mark.parametrize("families, equal", [(language_models, 100), (vision_models, 20)])
def test_every_architecture_is_equal_or_refused(families, equal):
    results = [try_family(each) for each in families()]
    failed = [f"{result.family.name}:\n{in_words(result)}" for result in results if result.state in FAILED]
    assert not failed, "\n".join(failed)
    assert Counter(result.state for result in results)[EQUAL] >= equal, transformers.__version__
