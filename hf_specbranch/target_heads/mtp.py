"""Multi-token-prediction layers that come with a checkpoint, such as those of DeepSeek-V3 and GLM-4-MoE.

The state for a column is the target's last hidden state in the column before. The layer joins it with the embedding of
the token and runs a decoder layer of the target's kind. The target's output layer scores the result, which is also the
state for the next token. So one layer drafts any number of tokens. Of several layers the first one drafts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .base import TargetHead, cache_for, causal_masks, next_positions

MTP = "mtp"
TOKENS = 3  # to draft, if nothing else is set: a layer was trained to look one token ahead, and less sure after that


class MtpHead(TargetHead):
    """The first multi-token-prediction layer of a target; see `TargetHead`.

    Args:
        target: the model that it belongs to.
        mtp: its layers, as transformers has loaded them. Embeddings and output layer are the target's.
    """

    source = "MTP"
    _supports_flash_attn = _supports_flex_attn = True  # the mask probe asks for sdpa or eager

    def __init__(self, target: PreTrainedModel, mtp: Any) -> None:
        super().__init__(mtp.config)
        self.mtp, self.state_size = mtp, mtp.config.hidden_size
        self.state_layers = (target.config.get_text_config(decoder=True).num_hidden_layers,)
        self.kind: str = (getattr(mtp.config, "layer_types", None) or ["full_attention"])[0]
        self.rotary_by_kind = {"layer_type": self.kind} if getattr(mtp, "has_per_layer_rope", False) else {}
        self.generation_config = GenerationConfig(num_assistant_tokens=TOKENS)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """The decoder layer is one of the target's, and has its experts."""
        return True

    def get_input_embeddings(self) -> nn.Module:
        table: nn.Module = self.mtp.embed_tokens
        return table

    def get_output_embeddings(self) -> nn.Module:
        layer: nn.Module = self.mtp.shared_head
        return layer

    def encode(self, hidden: Tensor) -> Tensor:
        return hidden

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
        """Return logits [B, N or logits_to_keep, V] and the next states [B, N, S], given tokens [B, N] and states."""
        mtp, embedded = self.mtp, self.mtp.embed_tokens(input_ids)
        states = torch.zeros_like(embedded) if states is None else states.to(embedded.dtype)
        past_key_values = cache_for(past_key_values, use_cache)
        positions = next_positions(input_ids, past_key_values) if position_ids is None else position_ids
        mask = causal_masks(self.config, embedded, attention_mask, past_key_values, positions, [self.kind])[self.kind]
        angles = None
        if mtp.rotary_emb is not None:
            angles = mtp.rotary_emb(embedded, position_ids=positions, **self.rotary_by_kind)
        hidden = mtp.layers[0](
            embedded, states, position_embeddings=angles, attention_mask=mask, position_ids=positions,
            past_key_values=past_key_values,
        )  # fmt: skip
        if mtp.use_shared_post_norm:
            hidden = mtp.shared_post_norm(hidden)
        project = getattr(mtp, "_project_to_logits", mtp.shared_head)
        logits = project(hidden[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values, hidden_states=(hidden,))


def mtp_head(target: PreTrainedModel) -> MtpHead:
    """Load the multi-token-prediction layers of a target from its checkpoint.

    Raises:
        ValueError: if it has none.
    """
    text, name = target.config.get_text_config(decoder=True), target.config.name_or_path
    if not getattr(text, "num_mtp_layers", None):
        raise ValueError(
            f"draft={MTP!r}: the config of {type(target).__name__} names no multi-token-prediction layers "
            f"(num_mtp_layers): choose another draft"
        )
    if not name:
        raise ValueError(
            f"draft={MTP!r}: {type(target).__name__} was not loaded from a checkpoint that holds the layers"
        )
    try:
        mtp = MtpModel.from_pretrained(target, device_map={"": target.device})
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"draft={MTP!r}: the layers cannot be loaded from {name}: {error}") from error
    head = MtpHead(target, mtp.to(target.dtype))
    head.eval()
    return head
