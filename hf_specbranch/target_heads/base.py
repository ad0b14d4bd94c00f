"""What a head of the target is: a small model that reads tokens together with the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

SLIDING = "sliding_attention"


class TargetHead(PreTrainedModel):
    """A small model that drafts from the target's hidden states.

    The token in column `c` is read together with a *state*: what the target, or the head itself, made of the text
    before that token. `encode` turns the target's hidden states in column `c - 1` into the state for column `c`. The
    head's own output in column `c - 1` takes its place where the target has not read that column yet.

    A subclass implements `forward(input_ids, states=None, ...)`. Its output has `logits` [B, N, V'] and
    `hidden_states` with one element [B, N, S], the states for the columns after these. Without `states` it reads zeros:
    that is how the mask probe and the self-check call it.

    Attributes:
        source: its name in the statistics.
        state_layers: indices into the target's `hidden_states` that `encode` reads.
        state_size: the numbers in a state (S).
        token_ids: [V'] the target's token for each of the head's own; None if they are the same.
        block: tokens of a pass that drafts all of them at once, the last of the text included; 0: one after the other.
        drafts_ahead: it can go on while the target verifies what it drafted.
        own_layers_only: none of its layers may be replaced by our kernels.
    """

    source = ""
    block = 0
    drafts_ahead = True
    own_layers_only = False
    state_layers: tuple[int, ...] = ()
    state_size = 0
    token_ids: Tensor | None
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("token_ids", None, persistent=False)  # it moves with the weights

    def encode(self, hidden: Tensor) -> Tensor:
        """Return states [B, N, S], given the hidden states of `state_layers`, joined: [B, N, layers * H]."""
        raise NotImplementedError


def cache_for(past_key_values: Any, use_cache: bool) -> Any:
    """Return the cache that a pass was given, or a new one if it is to return one."""
    return DynamicCache() if past_key_values is None and use_cache else past_key_values


class DraftVocabulary:
    """Maps a head's own vocabulary to the target's; the head's `DraftModel` calls it as it calls a shortlist.

    Args:
        ids: [V'] the target's tokens, each once.
        vocabulary: how many tokens the target has.

    Example:
        >>> vocabulary = DraftVocabulary(torch.tensor([4, 1]), 6)
        >>> vocabulary.expand(torch.tensor([[0.5, 2.0]])).argmax(-1).tolist()
        [1]
    """

    filler = -3e4  # the logit of all other tokens: finite, since processors may forbid all of the head's own

    def __init__(self, ids: Tensor, vocabulary: int) -> None:
        self.ids, self.vocabulary = ids, vocabulary

    def add_text(self, rows: Sequence[Sequence[int]]) -> None:
        """The vocabulary of a head does not depend on the text."""

    def expand(self, logits: Tensor) -> Tensor:
        """Return logits [..., V] over the target's vocabulary, given those over the head's own [..., V']."""
        full = logits.new_full((*logits.shape[:-1], self.vocabulary), self.filler)
        return full.index_copy_(-1, self.ids, logits)


def causal_masks(
    config: Any, embedded: Tensor, attention_mask: Any, past: Any, positions: Tensor, kinds: Sequence[str]
) -> dict[str, Any]:
    """Return the mask of each kind of layer: the given one, or the causal one of transformers.

    Args:
        config: of the head.
        embedded: [B, N, H] what the head reads.
        attention_mask: None; [B, S]; [B, 1, N, S]; or a dict of such masks by kind of layer.
        past: the cache, if there is one.
        positions: [B, N].
        kinds: as in `config.layer_types`.
    """
    if isinstance(attention_mask, dict):
        return attention_mask
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
        return dict.fromkeys(kinds, attention_mask)
    makers = {kind: create_sliding_window_causal_mask if kind == SLIDING else create_causal_mask for kind in kinds}
    given = dict(inputs_embeds=embedded, attention_mask=attention_mask, past_key_values=past, position_ids=positions)
    return {kind: make(config=config, **given) for kind, make in makers.items()}


def next_positions(tokens: Tensor, past: Any) -> Tensor:
    """Return positions [1, N] for tokens [B, N] that follow what is in a cache."""
    begin = 0 if past is None else past.get_seq_length()
    return torch.arange(begin, begin + tokens.shape[1], device=tokens.device)[None]
