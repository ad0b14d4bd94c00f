"""EAGLE-3 drafts in the layout of the speculators project.

The state for a column is a projection (`fc`) of the target's hidden states of three layers. The first decoder layer's
attention reads the embedding of the token beside the state. What the last layer makes of both predicts the next token,
and is the state for it. The draft has a vocabulary of its own, a part of the target's (`d2t`).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from .base import TargetHead, cache_for, causal_masks, next_positions

LAYERS: dict[str, tuple[Any, Any, Any]] = {
    "llama": (modeling_llama.LlamaDecoderLayer, modeling_llama.LlamaRMSNorm, modeling_llama.LlamaRotaryEmbedding),
    "qwen3": (modeling_qwen3.Qwen3DecoderLayer, modeling_qwen3.Qwen3RMSNorm, modeling_qwen3.Qwen3RotaryEmbedding),
}


@dataclass(frozen=True)
class Eagle3Settings:
    """The fields of a published config.json, besides those of the decoder layers.

    Attributes:
        draft_vocab_size: tokens that the draft scores.
        target_hidden_size: of the target, if it differs from the draft's.
        layers: indices into the target's `hidden_states` (`eagle_aux_hidden_state_layer_ids`).
        norm_before_residual: the residual of the first layer is the state after its norm.
        norm_before_fc: one norm over the joined hidden states, before `fc`.
        fc_norm: a norm for each of them instead.
        norm_output: the next state is what the output layer reads, after the last norm.
        tokens: how many tokens to draft, if the config says so.
    """

    draft_vocab_size: int
    layers: tuple[int, ...]
    target_hidden_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    tokens: int | None = None

    @classmethod
    def from_dict(cls, config: dict[str, Any], target_layers: int) -> Eagle3Settings:
        """Read the settings from a config.json for a target with so many layers."""
        methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        layers = config.get("eagle_aux_hidden_state_layer_ids") or (2, target_layers // 2, target_layers - 3)
        return cls(
            draft_vocab_size=config.get("draft_vocab_size", 32000),
            layers=tuple(layers),
            target_hidden_size=config.get("target_hidden_size"),
            tokens=methods[0].get("speculative_tokens"),
            **{flag: bool(config.get(flag)) for flag in flags},
        )


class FirstLayer(nn.Module):
    """A decoder layer whose attention reads the token's embedding and the state side by side.

    Args:
        config: of the decoder layers.
        kind: the class of a plain decoder layer.
        norm: the class of its norms.
        norm_before_residual: see `Eagle3Settings`.
    """

    def __init__(self, config: Any, kind: Any, norm: Any, norm_before_residual: bool) -> None:
        super().__init__()
        plain, self.norm_before_residual = kind(config, 0), norm_before_residual
        self.self_attn, self.mlp = plain.self_attn, plain.mlp
        self.input_layernorm, self.post_attention_layernorm = plain.input_layernorm, plain.post_attention_layernorm
        self.hidden_norm = norm(config.hidden_size, eps=config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            before = getattr(self.self_attn, name)
            wider = nn.Linear(2 * before.in_features, before.out_features, bias=before.bias is not None)
            setattr(self.self_attn, name, wider)

    def forward(self, embedded: Tensor, states: Tensor, **arguments: Any) -> Tensor:
        """Return [B, N, H], given embeddings and states of that shape."""
        normed = self.hidden_norm(states)
        residual = normed if self.norm_before_residual else states
        attended, _ = self.self_attn(torch.cat([self.input_layernorm(embedded), normed], dim=-1), **arguments)
        hidden = residual + attended
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Draft(TargetHead):
    """An EAGLE-3 draft; see `TargetHead`.

    Args:
        config: of the decoder layers, a `LlamaConfig` or a `Qwen3Config`; `vocab_size` is the target's.
        settings: the rest of the published config.
    """

    source = "EAGLE-3"

    def __init__(self, config: Any, settings: Eagle3Settings) -> None:
        super().__init__(config)
        layer, norm, rotary = LAYERS[config.model_type]
        self.settings, self.state_layers, self.state_size = settings, settings.layers, config.hidden_size
        width, count = settings.target_hidden_size or config.hidden_size, len(settings.layers)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(count * width, config.hidden_size, bias=False)
        first = FirstLayer(config, layer, norm, settings.norm_before_residual)
        self.layers = nn.ModuleList([first, *(layer(config, index) for index in range(1, config.num_hidden_layers))])
        self.kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        self.norm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, settings.draft_vocab_size, bias=False)
        self.rotary_emb = rotary(config)
        if settings.norm_before_fc:
            self.input_norm = norm(count * width, eps=config.rms_norm_eps)
        if settings.fc_norm:
            self.fc_norm = nn.ModuleList([norm(width, eps=config.rms_norm_eps) for _ in range(count)])
        self.generation_config = GenerationConfig(num_assistant_tokens=settings.tokens)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def encode(self, hidden: Tensor) -> Tensor:
        if self.settings.norm_before_fc:
            hidden = self.input_norm(hidden)
        if self.settings.fc_norm:
            parts = hidden.chunk(len(self.fc_norm), dim=-1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        states: Tensor = self.fc(hidden)
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
        """Return logits [B, N or logits_to_keep, V'] and the next states [B, N, S], given tokens [B, N] and states."""
        embedded = self.embed_tokens(input_ids)
        states = torch.zeros_like(embedded) if states is None else states.to(embedded.dtype)
        past_key_values = cache_for(past_key_values, use_cache)
        positions = next_positions(input_ids, past_key_values) if position_ids is None else position_ids
        masks = causal_masks(self.config, embedded, attention_mask, past_key_values, positions, self.kinds)
        shared = dict(position_ids=positions, past_key_values=past_key_values, use_cache=use_cache)
        shared["position_embeddings"] = self.rotary_emb(embedded, position_ids=positions)
        hidden = self.layers[0](embedded, states, attention_mask=masks[self.kinds[0]], **shared)
        for layer, kind in zip(list(self.layers)[1:], self.kinds[1:]):
            hidden = layer(hidden, attention_mask=masks[kind], **shared)
        normed = self.norm(hidden)
        logits = self.lm_head(normed[:, -logits_to_keep:])
        following = normed if self.settings.norm_output else hidden
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values, hidden_states=(following,))


def layer_config(given: dict[str, Any]) -> Any:
    """Return the config of the decoder layers, given `transformer_layer_config`."""
    given = copy.deepcopy(given)
    kind = given.pop("model_type", "qwen3")
    if kind not in LAYERS:
        raise ValueError(f"decoder layers of type {kind!r}: expected {' or '.join(map(repr, LAYERS))}")
    for name in ("architectures", "attn_implementation", "_attn_implementation"):
        given.pop(name, None)
    return AutoConfig.for_model(kind, **given)
