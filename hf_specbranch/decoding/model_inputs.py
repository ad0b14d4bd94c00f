"""Further inputs of a model at every step: token types, cross-attention inputs, arguments of its own.

Plain `generate()` passes the arguments it does not know to every forward, extends those that have a value per token,
and lets the model (`prepare_inputs_for_generation`) change any of that. So we call the model's own preparation for the
first new tokens, and see what it returns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin

# What transformers passes to a forward over tokens alone.
USUAL_INPUTS = {"attention_mask", "position_ids", "past_key_values", "cache_params", "use_cache", "logits_to_keep"}
# Also set by our own passes, or not needed there.
OURS = USUAL_INPUTS | {
    "input_ids", "inputs_embeds", "output_attentions", "output_hidden_states", "return_dict", "cache_position",
    "next_sequence_length",
    "mm_token_type_ids",  # says where images are; new tokens are text
}  # fmt: skip
PREPARATION = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")


class ModelInputs(NamedTuple):
    """Further keyword arguments of the target's forward after the prompt."""

    constant: dict[str, Any] = {}  # the same in every pass
    per_token: dict[str, Tensor] = {}  # [B, 1], the value at every new token
    position_ids: Tensor | None = None  # [B, 1] or [axes, B, 1] of the first new token; None: the model counts slots

    @property
    def names(self) -> list[str]:
        return [*self.constant, *self.per_token]

    def of(self, queries: int) -> dict[str, Any]:
        """Return the arguments of a pass over this many new tokens."""
        return self.constant | {name: value.expand(-1, queries) for name, value in self.per_token.items()}


def inputs_after_prompt(model: PreTrainedModel, input_ids: Tensor, model_kwargs: dict[str, Any]) -> ModelInputs:
    """Return what plain `generate()` would pass to the target after the prompt.

    Args:
        model: the target.
        input_ids: [B, P] the prompt.
        model_kwargs: as transformers has prepared them for the prompt.

    Raises:
        ValueError: an argument changes from token to token in a way that cannot be predicted for drafted tokens.
    """
    given = {name for name, value in model_kwargs.items() if value is not None} - OURS
    if not given and all(getattr(type(model), name) is getattr(GenerationMixin, name) for name in PREPARATION):
        positions: Tensor | None = model_kwargs.get("position_ids")
        return ModelInputs(position_ids=None if positions is None else positions[..., -1:] + 1)
    try:
        one, two, later = (_prepared(model, input_ids, model_kwargs, *step) for step in ((1, 1), (2, 2), (2, 1)))
        positions, *_ = (inputs.pop("position_ids", None) for inputs in (one, two, later))
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"{type(model).__name__} prepares its inputs in a way that cannot be predicted for drafted tokens: pass "
            f"specbranch=False"
        ) from error
    constant, per_token = {}, {}
    for name, value in one.items():
        if _equal(value, later.get(name)) and _is_for_one_token(value, two.get(name), model_kwargs.get(name)):
            per_token[name] = value
            if _equal(value.expand(-1, 2), two[name]) or _equal(value, two[name]):
                continue
        elif _equal(value, two.get(name)) and _equal(value, later.get(name)):
            constant[name] = value
            continue
        remedy = f"leave {name} out, or pass specbranch=False" if name in given else "pass specbranch=False"
        raise ValueError(
            f"{type(model).__name__} is given another {name} at each token, and what it will be for drafted tokens is "
            f"not known: {remedy}"
        )
    return ModelInputs(constant, per_token, positions)


class Reread(NamedTuple):
    """Where plain `generate()` drops its cache."""

    at: int  # the length of the text there
    whole: bool  # it reads the whole text again; otherwise it continues without it (Phi-3, transformers before 5.20)


def reread_of(model: PreTrainedModel) -> Reread | None:
    """Return where plain `generate()` drops its cache, if it does: the inputs prepared for that step show it.

    Phi-3 drops it where its rotary embedding changes from short to long texts.
    """
    limit = getattr(model.config, "original_max_position_embeddings", None)
    own_way = type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    if not own_way or not isinstance(limit, int):
        return None
    cache, keys = DynamicCache(), torch.zeros((1, 1, limit, 1))
    cache.update(keys, keys, 0)
    ids = torch.zeros((1, limit + 1), dtype=torch.long, device=model.device)
    inputs = model.prepare_inputs_for_generation(ids, past_key_values=cache, use_cache=True, next_sequence_length=1)
    if inputs.get("past_key_values") is not None:
        return None
    return Reread(limit + 1, whole=inputs["input_ids"].shape[1] == limit + 1)


def _prepared(model: Any, input_ids: Tensor, model_kwargs: dict[str, Any], new: int, queries: int) -> dict[str, Any]:
    """Return the model's own arguments, and the positions, for the last `queries` of `new` tokens after the prompt."""
    kwargs = {**model_kwargs, "past_key_values": DynamicCache()}
    ids = input_ids
    for _ in range(new):
        kwargs = model._update_model_kwargs_for_generation({}, kwargs, is_encoder_decoder=False)
        ids = torch.cat([ids, ids.new_zeros((ids.shape[0], 1))], dim=1)
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=queries, **kwargs)
    foreign = (name for name in inputs if name == "position_ids" or name not in OURS)
    return {name: inputs[name] for name in foreign if inputs[name] is not None}


def _is_for_one_token(value: Any, for_two: Any, given: Any) -> bool:
    """Return whether a value [B, 1] is one per token: there are two for two tokens, or many for the prompt."""
    if not isinstance(value, Tensor) or value.ndim != 2 or value.shape[1] != 1:
        return False
    others = (other for other in (for_two, given) if isinstance(other, Tensor) and other.ndim == 2)
    return any(other.shape[1] > 1 for other in others)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    return one is other or bool(one == other)
