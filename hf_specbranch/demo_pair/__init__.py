"""A small target model and two draft models that come with the package, so that no network is needed.

See `docs/demo_pair.md` for what they were trained on and how well they agree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, overload

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from ..heads import LengthHead

FOLDERS = {"good": "draft", "weak": "weak"}
HEADS = {"good": "head", "weak": "weak_head"}


@overload
def load_demo_pair(
    draft: Literal["good", "weak"] = "good",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    head: Literal[False] = False,
) -> tuple[LlamaForCausalLM, LlamaForCausalLM, PreTrainedTokenizerBase]: ...


@overload
def load_demo_pair(
    draft: Literal["good", "weak"] = "good",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    head: Literal[True],
) -> tuple[LlamaForCausalLM, LlamaForCausalLM, PreTrainedTokenizerBase, LengthHead]: ...


def load_demo_pair(
    draft: Literal["good", "weak"] = "good",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    head: bool = False,
) -> Any:
    """Load the embedded target, one of its two drafts, and the tokenizer they share.

    Args:
        draft: "good" agrees with the target on most tokens, "weak" on fewer than half.
        dtype: dtype of the weights in memory; they are stored in bfloat16, so float32 loses nothing.
        device: where to put both models.
        head: also load the length head trained for this draft.

    Returns:
        `(target, draft, tokenizer)`, both models in eval mode; with `head=True` the head is the fourth.

    Example:
        >>> target, draft, tokenizer = load_demo_pair()
        >>> inputs = tokenizer("def add(a, b):", return_tensors="pt")
        >>> out = target.generate(**inputs, assistant_model=draft, max_new_tokens=64)
    """
    if draft not in FOLDERS:
        raise ValueError(f"draft is {draft!r}: expected one of {', '.join(map(repr, FOLDERS))}")
    here = Path(__file__).parent

    def load(name: str) -> LlamaForCausalLM:
        model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(here / name, dtype=dtype, local_files_only=True)
        return model.to(device).eval()

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(here / "target", local_files_only=True)
    pair = load("target"), load(FOLDERS[draft]), tokenizer
    if not head:
        return pair
    return (*pair, LengthHead.from_pretrained(here / HEADS[draft]).to(device))
