"""Prompts with images for tiny vision-language models."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .tiny import PAD, TEXT_TOKENS

SIDE = 4  # an image has this many patches in each direction
BEFORE, AFTER = 7, 5  # text tokens around the image


def image_prompts(model: PreTrainedModel, rows: int, seed: int = 0) -> dict[str, Tensor] | None:
    """Left-padded prompts with one image of noise each; None where the form of the images is not known.

    Args:
        model: a vision-language model from `tiny_model`.
        rows: how many prompts; each is two tokens shorter than the one before.
        seed: of text and pixels.
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
        several = "pixel_attention_mask" in takes  # several images a row
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
    """What the vision tower makes of the pixels: as many vectors as the prompt needs image tokens."""
    with torch.no_grad():
        given = model.get_image_features(**pixels)
    found = getattr(given, "pooler_output", given)
    return [found] if isinstance(found, Tensor) else list(found)
