"""Compares speculative decoding with plain `generate()` on one tiny model."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import SpecBranchConfig
from ..mixin import specbranch
from .images import image_prompts
from .tiny import PAD, TEXT_TOKENS, noisy_copy

EQUAL, REFUSED, WRONG, ERROR, NEAR_TIE = "equal", "refused", "wrong", "error", "near tie"
NOT_BUILT, PLAIN_FAILS = "not built", "plain fails"

PROMPT, NEW_TOKENS = 11, 20  # together several times the windows of the tiny configurations
NEAR = 1e-4  # logits this close may change places by rounding
OURS = Path(__file__).resolve().parents[1]

POLICIES = {
    "autoregressive": SpecBranchConfig(policy="autoregressive"),
    "vanilla": SpecBranchConfig(policy="vanilla", max_draft_length=4, confidence_threshold=0.0, tree_leaves=3),
    "specbranch": SpecBranchConfig(
        policy="specbranch",
        max_draft_length=3,
        confidence_threshold=0.05,
        max_branches=3,
        max_rejection_branches=2,
        tree_leaves=2,
    ),
}


@dataclass(frozen=True)
class Case:
    """One comparison.

    Args:
        inputs: "one row", "padded batch", "one image" or "batch of images".
        policy: the policy that was tried; empty where it did not come to that.
        state: "equal", "refused" (an error of ours, before any work), "wrong", "error" (any other exception),
            "near tie" (the first difference is between logits that rounding may exchange), "not built" or
            "plain fails" (transformers' own `generate()` raises, or its logits are not finite).
        note: the error, or the first difference.
        accepted: the share of drafted tokens that were accepted.
    """

    inputs: str
    policy: str
    state: str
    note: str = ""
    accepted: float = 0.0


def text_prompts(rows: int, seed: int = 0) -> dict[str, Tensor]:
    """Left-padded prompts; each row is three tokens shorter than the one before."""
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(TEXT_TOKENS.start, TEXT_TOKENS.stop, (rows, PROMPT), generator=draws)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 3 * row] = 0
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


def check(plain: PreTrainedModel) -> Iterator[Case]:
    """Every policy on one row, on a padded batch, and on prompts with images where the model takes them."""
    try:
        draft, model = noisy_copy(plain), specbranch(copy.deepcopy(plain))
    except Exception as error:
        yield Case("", "", REFUSED if is_refusal(error) else ERROR, one_line(error))
        return
    inputs: dict[str, dict[str, Any] | None] = {"one row": text_prompts(1), "padded batch": text_prompts(3)}
    try:
        inputs |= {"one image": image_prompts(plain, 1), "batch of images": image_prompts(plain, 3)}
    except Exception:  # images of a form that is not known here
        pass
    for name, arguments in inputs.items():
        if arguments is not None:
            cases = list(_compare(plain, model, draft, name, arguments))
            if "image" not in name or cases[0].state != PLAIN_FAILS:  # else the form was not right after all
                yield from cases


def _compare(plain: Any, model: Any, draft: PreTrainedModel, name: str, inputs: dict[str, Any]) -> Iterator[Case]:
    arguments = {**inputs, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    try:
        expected = plain.generate(**arguments, output_logits=True, return_dict_in_generate=True)
    except Exception as error:
        yield Case(name, "", PLAIN_FAILS, one_line(error))
        return
    logits = torch.stack(expected.logits, 1)  # [B, T, V]
    if not logits.isfinite().all():
        yield Case(name, "", PLAIN_FAILS, "its logits are not finite")
        return
    for policy, settings in POLICIES.items():
        try:
            got = model.generate(**arguments, assistant_model=draft, specbranch=settings)
        except Exception as error:
            yield Case(name, policy, REFUSED if is_refusal(error) else ERROR, one_line(error))
            continue
        state, note = compare(got, expected.sequences, logits)
        stats = model.specbranch_stats
        if stats is None and state == EQUAL:
            yield Case(name, policy, REFUSED, "left to transformers' own decoding, with a warning that says why")
        else:
            yield Case(name, policy, state, note, stats.draft_acceptance_rate if stats else 0.0)


def compare(got: Tensor, expected: Tensor, logits: Tensor) -> tuple[str, str]:
    """The state of a comparison and its first difference; `logits` are those of the expected new tokens."""
    if got.shape != expected.shape:
        return WRONG, f"shape {tuple(got.shape)} in place of {tuple(expected.shape)}"
    differs = got != expected
    if not differs.any():
        return EQUAL, ""
    step = int(differs.any(0).nonzero()[0])
    row = int(differs[:, step].nonzero()[0])
    new = step - expected.shape[1] + logits.shape[1]
    first, second = logits[row, new].topk(2).values.tolist()
    note = f"row {row}, new token {new}: {int(got[row, step])} in place of {int(expected[row, step])}"
    return (NEAR_TIE if first - second < NEAR else WRONG), f"{note} (the best logits differ by {first - second:.1e})"


def is_refusal(error: Exception) -> bool:
    """Whether an error comes from a `raise` of ours, and not from the depths of a forward pass."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(last.filename).resolve().is_relative_to(OURS)
    return ours and isinstance(error, (ValueError, TypeError)) and (last.line or "").startswith("raise ")


def one_line(error: Exception) -> str:
    """The message of an error, with its type unless it is a refusal."""
    text = " ".join(str(error).split())
    return text if is_refusal(error) else f"{type(error).__name__}: {text}"[:200]
