"""Cheaper copies of a draft: weights of eight bits, an output layer over a shortlist of the vocabulary.

Only the target decides which tokens are generated, so a draft may be approximate. A copy has modules of its own and
shares all parameters with the draft except those that it stores in another form. The draft itself is left as it is.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
from torch import nn
from transformers import PreTrainedModel

from ..layers.packed_linear import Bits8, PackedLinear, can_be_packed
from ..layers.products import is_plain
from ..layers.shortlist import Shortlist, read_tokens
from ..model_state import every_buffer, every_module, every_parameter, has_adapters, state_of

ROUTERS = ("gate", "router")  # names of layers that choose experts: small, and sensitive


class DraftForm(NamedTuple):
    """How a copy of a draft differs from the draft itself."""

    weights: Bits8 | None = None
    shortlist: int | str | None = None  # how many tokens are scored, those with the lowest ids; or a file of tokens

    @property
    def name(self) -> str:
        """The form in words."""
        return f"{self.weights or 'own'} weights, shortlist {self.shortlist or 'none'}"


def why_not_copied(draft: PreTrainedModel, form: DraftForm) -> str:
    """Return why there is no copy of a draft in this form; empty if there can be one."""
    if has_adapters(draft):
        return "the draft has adapters, which may be switched between calls"
    if form.weights is not None and not any(can_be_packed(module) for module in every_module(draft)):
        return "the draft has no plain linear layers whose inner dimension is a multiple of 128"
    if form.shortlist is not None and not is_plain(draft.get_output_embeddings()):
        return "the output layer of the draft is no plain linear layer"
    return ""


def copy_of(draft: PreTrainedModel, form: DraftForm, user: object = None) -> PreTrainedModel:
    """Return the copy of a draft in a form. It is made once, and again when the draft's weights were replaced.

    A shortlist holds tokens of one text. So each call that runs at a time has a copy with its own output layer; all
    of them share the other weights.

    Args:
        draft: the draft.
        form: of the copy.
        user: an object that lives as long as the call.

    Raises:
        ValueError: if there can be none.
    """
    state = state_of(draft)
    with state.kernel_lock:
        weights = every_parameter(draft)
        now = draft.training, [*map(id, weights)], [*map(_version, weights)], [weight.device for weight in weights]
        copies: list[PreTrainedModel]
        made_from, copies = state.copies.get(form, (None, []))
        if made_from != now:
            if reason := why_not_copied(draft, form):
                raise ValueError(f"draft_weights={form.weights!r}, draft_shortlist={form.shortlist!r}: {reason}")
            copies = [_make(draft, form)]
            state.copies[form] = now, copies
        free = next((each for each in copies if form.shortlist is None or _is_free(each)), None)
        if free is None:
            copies.append(free := _with_own_shortlist(draft, form, copies[0]))
        state_of(free).user = None if user is None else ref(user)
        return free


def _is_free(twin: PreTrainedModel) -> bool:
    user = state_of(twin).user
    return user is None or user() is None


def _version(weight: torch.Tensor) -> int:
    """Return how often a weight was changed in place; `weight.data` may be changed unnoticed."""
    return 0 if weight.is_inference() else weight._version


def _make(draft: PreTrainedModel, form: DraftForm) -> PreTrainedModel:
    replaced, output = _shared(draft), draft.get_output_embeddings()
    shortlist = None if form.shortlist is None else _shortlist(draft, form)
    if shortlist is not None:
        replaced[id(output)] = shortlist.layer
    for name, module in draft.named_modules():
        is_router = name.rpartition(".")[2] in ROUTERS
        if form.weights is not None and id(module) not in replaced and can_be_packed(module) and not is_router:
            layer = cast(nn.Linear, module)
            replaced[id(module)] = PackedLinear(layer.weight, layer.bias, form.weights)
    return _copied(draft, draft, replaced, form, shortlist)


def _with_own_shortlist(draft: PreTrainedModel, form: DraftForm, first: PreTrainedModel) -> PreTrainedModel:
    """Return a further copy, which shares all weights with the first one except those of the output layer."""
    shortlist = _shortlist(draft, form)
    replaced = {**_shared(first), id(first.get_output_embeddings()): shortlist.layer}
    return _copied(draft, first, replaced, form, shortlist)


def _shared(model: PreTrainedModel) -> dict[int, Any]:
    """Return what `deepcopy` takes in place of a copy of its own, by `id`."""
    shared: list[Any] = [*every_parameter(model), *every_buffer(model)]
    if (attachment := model.__dict__.get("_specbranch_memory")) is not None:
        shared.append(attachment)  # of a draft that is a target as well
    return {id(each): each for each in shared}


def _copied(
    draft: PreTrainedModel, model: PreTrainedModel, replaced: dict[int, Any], form: DraftForm, shortlist: Any
) -> PreTrainedModel:
    twin = copy.deepcopy(model, replaced)
    state = state_of(twin)
    state.form, state.shortlist, state.original = form, shortlist, ref(draft)
    return twin


def _shortlist(draft: PreTrainedModel, form: DraftForm) -> Shortlist:
    assert form.shortlist is not None
    return Shortlist(cast(nn.Linear, draft.get_output_embeddings()), _tokens(draft, form.shortlist), form.weights)


def _tokens(draft: PreTrainedModel, shortlist: int | str) -> list[int]:
    """Return the fixed tokens: those of the file or with the lowest ids, and those that end a text.

    A tokenizer that was trained by merging pairs numbers its tokens by how frequent they were.
    """
    tokens = read_tokens(shortlist) if isinstance(shortlist, str) else list(range(shortlist))
    for config in (draft.config.get_text_config(decoder=True), draft.generation_config):
        ends = getattr(config, "eos_token_id", None)
        tokens += [] if ends is None else [ends] if isinstance(ends, int) else ends
    return tokens
