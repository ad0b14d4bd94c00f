"""What else a model is given at every step: token types, cross-attention inputs, arguments of its own.

Plain `generate()` hands the arguments it does not know to every pass, extends those that have a value per token, and
leaves it to the model (`prepare_inputs_for_generation`) to change any of that. So the model is asked what it would be
given for the first new tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin

# What transformers gives a forward over tokens alone.
USUAL_INPUTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
# What else the target's passes have of their own, or need not be told.
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

    @property
    def names(self) -> list[str]:
        return [*self.constant, *self.per_token]

    def of(self, queries: int) -> dict[str, Any]:
        """The arguments of a pass over so many new tokens."""
        return self.constant | {name: value.expand(-1, queries) for name, value in self.per_token.items()}


def inputs_after_prompt(model: PreTrainedModel, input_ids: Tensor, model_kwargs: dict[str, Any]) -> ModelInputs:
    """Find out what plain `generate()` would pass on.

    Args:
        model: the target.
        input_ids: [B, P] the prompt.
        model_kwargs: as transformers has prepared them for the prompt.

    Raises:
        ValueError: an argument changes from token to token in a way that cannot be foreseen for drafted tokens.
    """
    given = {name for name, value in model_kwargs.items() if value is not None} - OURS
    if not given and all(getattr(type(model), name) is getattr(GenerationMixin, name) for name in PREPARATION):
        return ModelInputs()
    try:
        one, two, later = (_prepared(model, input_ids, model_kwargs, *step) for step in ((1, 1), (2, 2), (2, 1)))
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"{type(model).__name__} prepares its inputs in a way that cannot be foreseen for drafted tokens: pass "
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
    return ModelInputs(constant, per_token)


def _prepared(model: Any, input_ids: Tensor, model_kwargs: dict[str, Any], new: int, queries: int) -> dict[str, Any]:
    """What is not ours of the arguments for the last `queries` tokens, once `new` tokens stand after the prompt."""
    kwargs = {**model_kwargs, "past_key_values": DynamicCache()}
    ids = input_ids
    for _ in range(new):
        kwargs = model._update_model_kwargs_for_generation({}, kwargs, is_encoder_decoder=False)
        ids = torch.cat([ids, ids.new_zeros((ids.shape[0], 1))], dim=1)
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=queries, **kwargs)
    return {name: value for name, value in inputs.items() if value is not None and name not in OURS}


def _is_for_one_token(value: Any, for_two: Any, given: Any) -> bool:
    """Whether [B, 1] is a value per token: there are two for two tokens, or many for the prompt."""
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
