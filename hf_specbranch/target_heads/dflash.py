"""DFlash block drafts: one pass drafts a whole block of tokens.

The draft keeps keys and values of the target's hidden states, one for each column that the target has read. A block is
the last token of the text and mask tokens after it; all of them see each other and the columns before them. What is
made of a mask token predicts the token in its place, by the target's output layer.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .base import SLIDING, TargetHead, cache_for


class DFlashHead(TargetHead):
    """A block draft of transformers with the embeddings and the output layer of its target; see `TargetHead`.

    `forward` takes the states of columns before the tokens, and positions of both. Without states it reads tokens one
    after the other.

    Args:
        target: the model that it was trained for.
        draft: the draft, as transformers has loaded it.
    """

    source = "DFlash"
    drafts_ahead = False
    own_layers_only = True  # attention also reads the context, which a self-check does not give it
    _supports_flash_attn = _supports_flex_attn = True

    def __init__(self, target: PreTrainedModel, draft: Any) -> None:
        config = copy.deepcopy(draft.config)
        config.vocab_size = target.config.get_text_config(decoder=True).vocab_size
        super().__init__(config)
        self.draft, self.block, self.mask_token, self.state_size = (
            draft,
            config.block_size,
            config.mask_token_id,
            config.hidden_size,
        )
        self.state_layers = tuple(layer + 1 for layer in config.target_layer_ids)  # counted from the embeddings
        table = target.get_input_embeddings()
        if hasattr(table, "embed_norm"):  # a block has the embeddings without their norm
            plain = nn.Embedding(1, 1)
            plain.weight, table = table.weight, plain
        self.embed_tokens, self.lm_head = table, target.get_output_embeddings()
        self.generation_config = GenerationConfig(num_assistant_tokens=self.block - 1)

    def get_input_embeddings(self) -> Any:
        return self.embed_tokens

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def encode(self, hidden: Tensor) -> Tensor:
        states: Tensor = self.draft.encoder(hidden)
        return states

    def forward(
        self,
        input_ids: Tensor,
        states: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, N or logits_to_keep, V] of tokens [B, N].

        Args:
            input_ids: [B, N].
            states: [B, M, S] of columns whose keys and values are not in the cache.
            attention_mask: what the tokens see, by kind of layer or the same for all.
            position_ids: [B, M + N].
            past_key_values: the cache.
            use_cache: return a cache, a new one if none is given.
            logits_to_keep: only those of the last tokens, unless it is 0.
        """
        hidden = self.embed_tokens(input_ids)
        states = hidden[:, :0] if states is None else states.to(hidden.dtype)
        past_key_values = cache_for(past_key_values, use_cache)
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        if position_ids is None:
            position_ids = torch.arange(past, past + input_ids.shape[1], device=hidden.device)[None]
        masks = attention_mask
        if not isinstance(masks, dict):
            masks = {kind: self._mask(masks, kind, input_ids, past) for kind in set(self.config.layer_types)}
        angles = self.draft.rotary_emb(hidden, position_ids)
        for layer, kind in zip(self.draft.layers, self.config.layer_types):
            hidden = layer(
                hidden, context_hidden_states=states, position_embeddings=angles, attention_mask=masks[kind],
                past_key_values=past_key_values,
            )  # fmt: skip
        hidden = self.draft.norm(hidden)
        logits = self.lm_head(hidden[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values, hidden_states=(hidden,))

    def _mask(self, given: Tensor | None, kind: str, tokens: Tensor, past: int) -> Tensor:
        """Return the given mask, or a causal one: the layers themselves are not causal."""
        if given is not None and given.dim() == 4:
            return given
        keys = torch.arange(past + tokens.shape[1], device=tokens.device)
        distance = keys[past:, None] - keys
        seen = (distance >= 0) & (distance < (self.config.sliding_window if kind == SLIDING else len(keys)))
        return seen[None, None] if given is None else seen & given[:, None, None, : len(keys)].bool()


def is_block_draft(config: Any) -> bool:
    """Whether a config, or its dict, is that of a DFlash draft."""
    names = ("block_size", "mask_token_id", "target_layer_ids")
    return all((name in config if isinstance(config, dict) else hasattr(config, name)) for name in names)
