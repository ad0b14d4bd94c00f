"""The embedded models: there, small, loadable offline, and as good as the documentation says."""

import runpy
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specbranch.demo_pair
from hf_specbranch import load_demo_pair
from hf_specbranch.bench import python_prompts

HOME = Path(hf_specbranch.demo_pair.__file__).parent
NAMES = ("target", "draft", "weak")


def agreement(draft_name: Literal["good", "weak"], prompts: int, new_tokens: int) -> float:
    """Greedy agreement of a draft along the target's own greedy outputs."""
    target, draft, tokenizer = load_demo_pair(draft_name)
    texts = [p.prompt for p in python_prompts()[:prompts]]
    batch = tokenizer(texts, return_tensors="pt", padding=True)  # [B, P]
    start = batch["input_ids"].shape[1]
    with torch.no_grad():
        ids = target.generate(**batch, do_sample=False, max_new_tokens=new_tokens)  # [B, P + N]
        mask = torch.cat([batch["attention_mask"], torch.ones_like(ids[:, start:])], dim=1)
        guesses = draft(input_ids=ids, attention_mask=mask).logits.argmax(-1)  # [B, P + N]
    written = ids[:, start:] != tokenizer.pad_token_id
    return float((guesses[:, start - 1 : -1] == ids[:, start:])[written].float().mean())


@pytest.mark.compat
@pytest.mark.parametrize("name", NAMES)
def test_each_folder_loads_with_the_auto_classes_from_disk_alone(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(HOME / name, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(HOME / name, local_files_only=True)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert len(tokenizer) == model.config.vocab_size
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_the_pair_shares_one_vocabulary_and_the_draft_is_ten_times_smaller() -> None:
    target, draft, tokenizer = load_demo_pair()
    assert target.config.vocab_size == draft.config.vocab_size == len(tokenizer)
    assert 8e6 <= target.num_parameters() <= 12e6
    assert draft.num_parameters() * 10 <= target.num_parameters()


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_stored_in_bfloat16(name: str) -> None:
    with safe_open(HOME / name / "model.safetensors", framework="pt") as weights:
        assert {weights.get_tensor(key).dtype for key in weights.keys()} == {torch.bfloat16}


def test_the_files_stay_small() -> None:
    sizes = {name: sum(f.stat().st_size for f in (HOME / name).iterdir()) for name in NAMES}
    assert sum(sizes.values()) <= 24e6
    assert (HOME / "weak" / "model.safetensors").stat().st_size <= 1e6


@pytest.mark.compat
def test_models_load_in_the_asked_dtype_and_in_eval_mode() -> None:
    target, draft, _ = load_demo_pair(dtype=torch.bfloat16)
    assert target.dtype == draft.dtype == torch.bfloat16
    assert load_demo_pair()[0].dtype == torch.float32
    assert not target.training and not draft.training


def test_an_unknown_draft_is_refused() -> None:
    with pytest.raises(ValueError, match="draft is 'strong': expected one of 'good', 'weak'"):
        load_demo_pair("strong")  # type: ignore[arg-type]


@pytest.mark.compat
@pytest.mark.parametrize("text", ["def f(x):\n\treturn x\r\n", "  héllo \U0001f600 <b>\n\n\n", "a  b   c    d\x00"])
def test_the_tokenizer_gives_back_any_text_unchanged(text: str) -> None:
    _, _, tokenizer = load_demo_pair()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.compat
def test_a_prompt_that_ends_in_a_newline_is_cut_as_the_whole_text_is() -> None:
    _, _, tokenizer = load_demo_pair()
    head, tail = "def f(x):\n", "    return x + 1\n\n\nclass A:\n"
    ids = tokenizer(head)["input_ids"] + tokenizer(tail)["input_ids"]
    assert ids == tokenizer(head + tail)["input_ids"]


@pytest.mark.compat
def test_padded_batches_give_the_output_of_single_prompts() -> None:
    target, _, tokenizer = load_demo_pair()
    prompts = ["def add(a, b):\n", "class Point:\n    def __init__(self, x, y):\n"]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    together = target.generate(**batch, do_sample=False, max_new_tokens=12)[:, batch["input_ids"].shape[1] :]
    for row, prompt in zip(together, prompts):
        single = tokenizer(prompt, return_tensors="pt")
        alone = target.generate(**single, do_sample=False, max_new_tokens=12)
        assert torch.equal(row, alone[0, single["input_ids"].shape[1] :])


@pytest.mark.slow
def test_the_good_draft_agrees_with_the_target_far_more_often_than_the_weak_one() -> None:
    good, weak = agreement("good", prompts=12, new_tokens=96), agreement("weak", prompts=12, new_tokens=96)
    assert 0.65 <= good <= 0.90
    assert 0.25 <= weak <= 0.55
    assert good - weak >= 0.15


def test_the_demo_streams_text_and_confirms_that_all_outputs_are_identical(capsys: pytest.CaptureFixture[str]) -> None:
    demo = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "demo.py"))
    assert demo["main"](["--prompt", "def add(a, b):", "--max-new-tokens", "16", "--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    assert "def add(a, b):" in printed
    for shown in ("plain     vanilla  specbranch", "over plain", "rolled back", "branch points hit", "a prediction"):
        assert shown in printed
    assert "All outputs are identical, token for token." in printed
