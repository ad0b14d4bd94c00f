"""Decoder layers: the sums of their residuals in the kernels of their norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels.linear import Partials
from ..kernels.norm import NormForm
from .base import Arguments, Replacement, gives_partials, layer_done, submodules, untouched
from .mixture import looks_like_mixture
from .norm import Ahead, shared_form


class LayerForward(Replacement):
    """Replaces a decoder layer: x + attention(norm(x)), then x + mlp(norm(x)). The next norm's kernel does each sum.

    Gemma 2 and 3 also normalise the outputs of attention and mlp ("sandwich").

    Args:
        module: the layer.
        ahead: shared by the replacements of the model.
        form: of all its norms.
        following: the norm that reads this layer's output, if it is of the same form.
    """

    def __init__(self, module: Any, ahead: Ahead, form: NormForm, following: nn.Module | None) -> None:
        super().__init__([*layer_norms(module), *([] if following is None else [following])])
        self.module, self.ahead, self.form, self.following = module, ahead, form, following
        self.sandwich = hasattr(module, "pre_feedforward_layernorm")
        self.has_ties = looks_like_mixture(module.mlp)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        module, ahead, form = self.module, self.ahead, self.form
        ahead.sums_partials = not self.sandwich and gives_partials(module.self_attn)
        out, *_ = module.self_attn(
            hidden_states=ahead.normed(hidden_states, module.input_layernorm, form),
            **dict(zip(("attention_mask", "position_ids", "past_key_values"), args)),
            **kwargs,
        )
        middle = module.post_attention_layernorm
        if self.sandwich:
            out, middle = ahead.normed(out, middle, form), module.pre_feedforward_layernorm
        normed, residual = ahead.add_norm(out, hidden_states, middle, form)
        ahead.sums_partials = not self.sandwich and self.following is not None and gives_partials(module.mlp)
        out = module.mlp(normed)
        if not isinstance(out, Tensor | Partials):
            out = out[0]  # some mixtures also return the weights of their experts
        ahead.sums_partials = False
        if self.sandwich:
            out = ahead.normed(out, module.post_feedforward_layernorm, form)
        if self.following is None:
            total = residual + torch.as_tensor(out)
        else:
            normed, total = ahead.add_norm(out, residual, self.following, form)
            ahead.known = total, self.following, normed
        layer_done()
        return total

    def telling_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Make the residual small: next to a large one, what a layer adds is lost in rounding."""
        return (_with_small_residual(args[0]), *args[1:]), kwargs


def recognise_layers(
    model: PreTrainedModel, layers: list[nn.Module], forms: dict[nn.Module, NormForm], ahead: Ahead
) -> dict[nn.Module, LayerForward]:
    """Return replacements for these layers, which follow each other, where their norms are known and alike."""
    found: dict[nn.Module, LayerForward] = {}
    for layer, following in zip(layers, [*layers[1:], None]):
        form = shared_form(forms, layer_norms(layer))
        if form is None:
            continue
        after: Any = getattr(following, "input_layernorm", None) if following else _final_norm(model)
        usable = after in forms and forms[after] == form and untouched(after)
        found[layer] = LayerForward(layer, ahead, form, after if usable else None)
    return found


def looks_like_layer(module: Any) -> bool:
    """Return whether a module has attention and MLP, with a norm before each."""
    return bool(submodules(module, ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")))


def layer_norms(module: Any) -> list[nn.Module]:
    """Return the norms that a layer applies itself."""
    names = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return [getattr(module, name) for name in names if hasattr(module, name)]


def _final_norm(model: PreTrainedModel) -> nn.Module | None:
    norm = getattr(model.base_model, "norm", None)
    return norm if isinstance(norm, nn.Module) else None


def _with_small_residual(hidden_states: Tensor) -> Tensor:
    """Scale to a mean square of 1/4096. Norms undo the scale, so what a layer adds does not change."""
    wide = hidden_states.float()
    return (wide * torch.rsqrt(wide.pow(2).mean()) / 64).to(hidden_states.dtype)
