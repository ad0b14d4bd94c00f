"""Finds out whether a folder or repository holds a head of a target, and loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from .base import TargetHead
from .dflash import DFlashHead, is_block_draft
from .eagle3 import Eagle3Draft, Eagle3Settings, layer_config
from .mtp import MTP, mtp_head

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
UNUSED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")  # needed in training alone
KIND = "speculators_model_type"
Head = TypeVar("Head", bound=TargetHead)


def load_head(target: PreTrainedModel, name: str | Path) -> TargetHead | None:
    """Load a head to the target's device, in its dtype; None if the name stands for something else.

    Args:
        target: the model that the head was trained for.
        name: a folder or a repository id; or "mtp" for the layers that come with the target's checkpoint.

    Raises:
        ValueError: if the head is of an unknown kind, or does not fit the target.
    """
    if name == MTP:
        return mtp_head(target)
    config, _ = PreTrainedConfig.get_config_dict(name)
    if is_block_draft(config):
        return block_draft(target, AutoModel.from_pretrained(name, dtype=target.dtype, attn_implementation="sdpa"))
    if KIND not in config:
        return None
    if config[KIND] != "eagle3":
        raise ValueError(f"draft={str(name)!r} is a speculator of type {config[KIND]!r}: expected 'eagle3'")
    try:
        return eagle3_from(target, config, _weights(name))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"draft={str(name)!r}: {error}") from error


def eagle3_from(target: PreTrainedModel, config: dict[str, Any], weights: dict[str, Tensor]) -> Eagle3Draft:
    """Make an EAGLE-3 draft from its published config and weights, and check that it fits the target."""
    ours = target.config.get_text_config(decoder=True)
    settings = Eagle3Settings.from_dict(config, ours.num_hidden_layers)
    layers = layer_config(config["transformer_layer_config"])
    layers._attn_implementation = "sdpa"  # takes the explicit masks that branches need
    _check_fits(settings, layers, ours)
    head = Eagle3Draft(layers, settings)
    weights = {key: value for key, value in weights.items() if key not in UNUSED}
    offsets = weights.pop("d2t", None)
    if settings.draft_vocab_size != layers.vocab_size:
        if offsets is None:
            raise ValueError(f"it scores {settings.draft_vocab_size} of {layers.vocab_size} tokens, and d2t is missing")
        head.token_ids = _token_ids(offsets, layers.vocab_size)
    if "lm_head.weight" not in weights:  # the target's own rows, as in training
        rows = target.get_output_embeddings().weight.detach()
        weights["lm_head.weight"] = rows if head.token_ids is None else rows[head.token_ids.to(rows.device)]
    shares = "embed_tokens.weight" not in weights
    missing, unexpected = head.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - ({"embed_tokens.weight"} if shares else set()):
        raise ValueError(f"weights are missing ({missing}) or not known ({unexpected})")
    if shares:
        head.embed_tokens.weight = target.get_input_embeddings().weight
    return prepared(head, target)


def block_draft(target: PreTrainedModel, draft: Any) -> DFlashHead:
    """Make a head of a DFlash draft, and check that it fits the target."""
    ours, theirs = target.config.get_text_config(decoder=True), draft.config
    if theirs.hidden_size != ours.hidden_size:
        raise ValueError(
            f"the draft was made for hidden states of size {theirs.hidden_size}, the target's have {ours.hidden_size}"
        )
    if wrong := [layer for layer in theirs.target_layer_ids if not 0 <= layer < ours.num_hidden_layers]:
        raise ValueError(f"the draft reads layers {wrong}, and the target has {ours.num_hidden_layers}")
    if not 0 <= theirs.mask_token_id < target.get_input_embeddings().weight.shape[0]:
        raise ValueError(f"the draft's mask_token_id={theirs.mask_token_id} is none of the target's tokens")
    return prepared(DFlashHead(target, draft), target)


def prepared(head: Head, target: PreTrainedModel) -> Head:
    """Return a head on the target's device, in its dtype, ready to draft."""
    head.to(device=target.device, dtype=target.dtype).eval()  # some weights may be the target's
    return head


def _check_fits(settings: Eagle3Settings, layers: Any, ours: Any) -> None:
    """Refuse a draft that was made for another target."""
    width = settings.target_hidden_size or layers.hidden_size
    if width != ours.hidden_size:
        raise ValueError(f"it was made for hidden states of size {width}, and the target's have {ours.hidden_size}")
    if wrong := [layer for layer in settings.layers if not 0 <= layer < ours.num_hidden_layers]:
        raise ValueError(f"it reads hidden states {wrong}, and the target has {ours.num_hidden_layers} layers")
    if layers.vocab_size != ours.vocab_size:
        raise ValueError(f"it was made for {layers.vocab_size} tokens, and the target has {ours.vocab_size}")


def _token_ids(offsets: Tensor, vocabulary: int) -> Tensor:
    """Return the target's token for each of the draft's, given `d2t`: how far it is from the draft's own number."""
    ids = torch.arange(offsets.shape[0]) + offsets.cpu().long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary or len(set(ids.tolist())) != len(ids):
        raise ValueError(f"d2t must name different tokens of the {vocabulary} that the target has")
    return ids


def _weights(name: str | Path) -> dict[str, Tensor]:
    """Read all tensors of a folder or repository: one file of safetensors, or several with an index."""
    quiet = dict(_raise_exceptions_for_missing_entries=False)
    if (single := cached_file(str(name), WEIGHTS, **quiet)) is not None:
        return load_file(single)
    index = cached_file(str(name), INDEX, **quiet)
    if index is None:
        raise ValueError(f"there is no {WEIGHTS}")
    files = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    return {key: value for file in files for key, value in load_file(cached_file(str(name), file)).items()}
