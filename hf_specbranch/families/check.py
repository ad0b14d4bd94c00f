"""Compare speculative decoding with plain `generate()` on one tiny model: prompts, images and the comparison."""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..attach import specbranch
from ..config import SpecBranchConfig
from .tiny import PAD, TEXT_TOKENS, noisy_copy

EQUAL, REFUSED, WRONG, ERROR, NEAR_TIE = "equal", "refused", "wrong", "error", "near tie"
NOT_BUILT, PLAIN_FAILS = "not built", "plain fails"

PROMPT, NEW_TOKENS = 11, 20  # together several times the windows of the tiny configurations
NEAR = 1e-4  # logits this close may change places by rounding
SIDE = 4  # an image has this many patches in each direction
BEFORE, AFTER = 7, 5  # text tokens around the image
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
        policy: the policy that was compared; empty where none was.
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
    """Return left-padded prompts; each row is three tokens shorter than the one before."""
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(TEXT_TOKENS.start, TEXT_TOKENS.stop, (rows, PROMPT), generator=draws)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 3 * row] = 0
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


def image_prompts(model: PreTrainedModel, rows: int, seed: int = 0) -> dict[str, Tensor] | None:
    """Return left-padded prompts with one image of noise each; None where the form of the images is not known.

    Args:
        model: a vision-language model from `tiny_model`.
        rows: how many prompts; each is two tokens shorter than the one before.
        seed: seed of text and pixels.
    """
    draws = torch.Generator().manual_seed(seed)
    config = model.config
    vision = getattr(config, "vision_config", None)
    patch = getattr(vision, "patch_size", None)
    patch = patch[0] if isinstance(patch, (list, tuple)) else patch
    takes = inspect.signature(model.forward).parameters
    # Without such a token the image is put in front of the text, or read by cross-attention.
    image_token = getattr(config, "image_token_id", None) if "aspect_ratio_ids" not in takes else None
    if vision is None or not isinstance(patch, int) or "pixel_values" not in takes:
        return None
    pixels: dict[str, Any]
    if "image_grid_thw" in takes:  # patches of all images in one list, two frames deep; a merger joins neighbours
        depth = getattr(vision, "temporal_patch_size", None) or 1
        flat = torch.rand(rows * SIDE**2, vision_channels(vision) * depth * patch**2, generator=draws)
        pixels = {"pixel_values": flat, "image_grid_thw": torch.tensor([[1, SIDE, SIDE]] * rows)}
    elif "image_position_ids" in takes:  # patches with their coordinates
        places = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE)).flip(-1)
        flat = torch.rand(rows, SIDE**2, 3 * patch**2, generator=draws)
        pixels = {"pixel_values": flat, "image_position_ids": places.expand(rows, -1, -1)}
    elif "aspect_ratio_ids" in takes:  # tiles, which cross-attention layers read
        tiles = int(vision.max_num_tiles)
        pixels = {
            "pixel_values": torch.rand(rows, 1, tiles, 3, SIDE * patch, SIDE * patch, generator=draws),
            "aspect_ratio_ids": torch.ones(rows, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(rows, 1, tiles, dtype=torch.long),
        }
    else:
        picture = torch.rand(rows, 3, SIDE * patch, SIDE * patch, generator=draws)
        several = "pixel_attention_mask" in takes  # several images per row
        pixels = {"pixel_values": picture[:, None] if several else picture}
        if _needs_sizes(model):
            pixels["image_sizes"] = torch.tensor([[SIDE * patch, SIDE * patch]] * rows)
    tokens = 0
    if image_token is not None:
        tokens = sum(len(part.reshape(-1, part.shape[-1])) for part in _features(model, pixels)) // rows
    ids = torch.randint(TEXT_TOKENS.start, TEXT_TOKENS.stop, (rows, BEFORE + tokens + AFTER), generator=draws)
    kinds = torch.zeros_like(ids)
    kinds[:, BEFORE : BEFORE + tokens] = 1
    if image_token is not None:
        ids = ids.masked_fill(kinds == 1, image_token)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 2 * row] = 0
    types = {name: kinds for name in ("token_type_ids", "mm_token_type_ids") if name in takes}
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask, **types, **pixels}


def vision_channels(vision: Any) -> int:
    return getattr(vision, "in_channels", None) or getattr(vision, "num_channels", None) or 3


def _needs_sizes(model: Any) -> bool:
    function = getattr(model, "get_image_features", None)
    sizes = inspect.signature(function).parameters.get("image_sizes") if function else None
    return sizes is not None and sizes.default is inspect.Parameter.empty


def _features(model: PreTrainedModel, pixels: dict[str, Any]) -> list[Tensor]:
    """Return the output of the vision tower: as many vectors as the prompt needs image tokens."""
    with torch.no_grad():
        given = model.get_image_features(**pixels)
    found = getattr(given, "pooler_output", given)
    return [found] if isinstance(found, Tensor) else list(found)


def check(plain: PreTrainedModel) -> Iterator[Case]:
    """Compare every policy on one row, on a padded batch, and on prompts with images where the model takes them."""
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
            if "image" not in name or cases[0].state != PLAIN_FAILS:  # otherwise the images had the wrong form
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
    """Return the state of a comparison and its first difference; `logits` are those of the expected new tokens."""
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
    """Whether an error was raised by this package, not inside a forward pass."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(last.filename).resolve().is_relative_to(OURS)
    return ours and isinstance(error, (ValueError, TypeError)) and (last.line or "").startswith("raise ")


def one_line(error: Exception) -> str:
    """Return the message of an error, with its type unless it is a refusal."""
    text = " ".join(str(error).split())
    return text if is_refusal(error) else f"{type(error).__name__}: {text}"[:200]
