"""Decoder layers: the sums of their residuals in the kernels of their norms, or both in the products around them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels.gemv import takes_norm
from ..kernels.linear import Partials
from ..kernels.norm import Norm, NormForm, add_norm
from .base import Arguments, Replacement, fuses_around, gives_partials, layer_done, submodules, untouched
from .mixture import looks_like_mixture
from .norm import Ahead, Around, parameters_of, shared_form


class Structure(NamedTuple):
    """Where a decoder layer has norms, by their names, and how attention and MLP are connected.

    Serial: y = x + after_attention(attention(before_attention(x))), then y + after_mlp(mlp(before_mlp(y))).
    Parallel: x + attention(before_attention(x)) + mlp(before_mlp(x)).
    """

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None
    parallel: bool = False

    @property
    def norms(self) -> set[str]:
        """The names of the norms."""
        return {name for name in self[:4] if name is not None}


INPUT, POST_ATTENTION = "input_layernorm", "post_attention_layernorm"
LLAMA = Structure(INPUT, None, POST_ATTENTION, None)
STRUCTURES = (
    LLAMA,
    Structure(INPUT, POST_ATTENTION, "pre_feedforward_layernorm", "post_feedforward_layernorm"),  # Gemma 2
    Structure(INPUT, "post_self_attn_layernorm", POST_ATTENTION, "post_mlp_layernorm"),  # GLM-4
    Structure(None, POST_ATTENTION, None, "post_feedforward_layernorm"),  # OLMo 2
    Structure(INPUT, None, INPUT, None, parallel=True),  # Cohere, Phi
    Structure(INPUT, None, POST_ATTENTION, None, parallel=True),  # GPT-NeoX
)
NORM_NAMES = set().union(*(structure.norms for structure in STRUCTURES))
RECURRENT_NAMES = ("linear_attn",)  # in place of attention; they take other arguments and return a tensor
ATTENTION_NAMES = ("self_attn", "attention", *RECURRENT_NAMES)
MLP_NAMES = ("mlp", "block_sparse_moe")
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm")


class LayerForward(Replacement):
    """Replaces a decoder layer. The kernel of the next norm does each sum of a residual, or the product before it.

    Args:
        module: the layer.
        structure: of the layer.
        ahead: shared by the replacements of the model.
        form: of all its norms.
        following: the norm that reads this layer's output, if it is of the same form.
    """

    def __init__(
        self, module: Any, structure: Structure, ahead: Ahead, form: NormForm, following: nn.Module | None
    ) -> None:
        super().__init__([*layer_norms(module), *([] if following is None else [following])])
        self.module, self.structure, self.ahead, self.form, self.following = module, structure, ahead, form, following
        self.attention, self.mlp = attention_of(module), mlp_of(module)
        self.is_recurrent = any(self.attention is getattr(module, name, None) for name in RECURRENT_NAMES)
        self.scale = float(getattr(module, "residual_multiplier", 1.0))
        self.has_ties = looks_like_mixture(self.mlp)
        norms = [parameters_of(norm, form) for norm in layer_norms(module)]
        self.fits_in_products = structure == LLAMA and self.scale == 1.0 and all(map(takes_norm, norms))

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = {**dict(zip(("attention_mask", "position_ids", "past_key_values"), args)), **kwargs}
        parts = self.mlp, self.attention  # an MLP has the largest weights, which decide
        fuses = self.fits_in_products and all(fuses_around(part, hidden_states) for part in parts)
        total = (self._in_products if fuses else self._in_norms)(hidden_states, given)
        layer_done()
        return total

    def _in_products(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        """Run with norms and sums in the launches of the products."""
        before_attention, before_mlp = (getattr(self.module, name) for name in (INPUT, POST_ATTENTION))
        self.ahead.around = Around(parameters_of(before_attention, self.form), x)
        x = self._attend(x, given)
        self.ahead.around = Around(parameters_of(before_mlp, self.form), x)
        total: Tensor = self.mlp(x)
        self.ahead.around = None
        return total

    def _in_norms(self, residual: Tensor, given: dict[str, Any]) -> Tensor:
        """Run with the sum of each residual in the kernel of the next norm."""
        structure = self.structure
        self.ahead.sums_partials = gives_partials(self.attention)
        out = self._attend(self._normed(residual, structure.before_attention), given)
        first, also = self._norm(structure.after_mlp), None
        if structure.parallel:
            also = out
            normed = self._normed(residual, structure.before_mlp)
        else:
            middle, residual = add_norm(
                out, residual, self._norm(structure.before_mlp), self._norm(structure.after_attention), scale=self.scale
            )
            normed = residual if middle is None else middle
        self.ahead.sums_partials = gives_partials(self.mlp)
        out = self.mlp(normed)
        self.ahead.sums_partials = False
        if not isinstance(out, Tensor | Partials):
            out = out[0]  # some mixtures also return the weights of their experts
        after = None if self.following is None else parameters_of(self.following, self.form)
        normed_total, total = add_norm(out, residual, after, first, also, self.scale)
        if self.following is not None and normed_total is not None:
            self.ahead.known = total, self.following, normed_total
        return total

    def _attend(self, normed: Tensor, given: dict[str, Any]) -> Any:
        """Return the output of attention, or of a recurrent layer: that knows no positions, and no mask of slots."""
        if not self.is_recurrent:
            return self.attention(hidden_states=normed, **given)[0]
        given = {name: value for name, value in given.items() if not name.startswith("position")}
        cache, mask = given.pop("past_key_values", None), given.pop("attention_mask", None)
        mask = mask if mask is None or mask.ndim == 2 else None
        return self.attention(hidden_states=normed, cache_params=cache, attention_mask=mask, **given)

    def _norm(self, name: str | None) -> Norm | None:
        return None if name is None else parameters_of(getattr(self.module, name), self.form)

    def _normed(self, x: Tensor, name: str | None) -> Tensor:
        """Return what attention or MLP reads: x, or a norm of it."""
        return x if name is None else self.ahead.normed(x, getattr(self.module, name), self.form)

    def telling_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Make the residual small: next to a large one, what a layer adds is lost in rounding."""
        return (_with_small_residual(args[0]), *args[1:]), kwargs


def recognise_layers(
    model: PreTrainedModel, layers: list[nn.Module], forms: dict[nn.Module, NormForm], ahead: Ahead
) -> dict[nn.Module, list[LayerForward]]:
    """Return replacements for these layers, which follow each other, one for each structure that a layer may have."""
    found: dict[nn.Module, list[LayerForward]] = {}
    for layer, following in zip(layers, [*layers[1:], None]):
        form = shared_form(forms, layer_norms(layer))
        if form is None:
            continue
        after = _final_norm(model) if following is None else _first_norm(following)
        usable = after in forms and forms[after] == form and untouched(after)
        found[layer] = [
            LayerForward(layer, structure, ahead, form, after if usable else None)
            for structure in structures_of(layer)
            if not (structure.parallel and hasattr(layer, "residual_multiplier"))
        ]
    return found


def structures_of(module: nn.Module) -> list[Structure]:
    """Return the structures that a layer with these norms may have."""
    names = {name for name, _ in module.named_children()} & NORM_NAMES
    return [structure for structure in STRUCTURES if structure.norms == names]


def looks_like_layer(module: Any) -> bool:
    """Return whether a module has attention, an MLP and norms in a known structure."""
    return bool(attention_of(module) and mlp_of(module) and structures_of(module))


def attention_of(module: Any) -> Any:
    """Return the attention of a layer, or the recurrent layer in its place, by name; None if there is none."""
    return next((inner for name in ATTENTION_NAMES for inner in submodules(module, (name,))), None)


def mlp_of(module: Any) -> Any:
    """Return the MLP or the mixture of experts of a layer, under one of its names; None if there is none."""
    return next((inner for name in MLP_NAMES for inner in submodules(module, (name,))), None)


def layer_norms(module: Any) -> list[nn.Module]:
    """Return the norms that a layer applies itself."""
    return [inner for name, inner in module.named_children() if name in NORM_NAMES]


def _first_norm(layer: nn.Module) -> Any:
    name = structures_of(layer)[0].before_attention
    return None if name is None else getattr(layer, name)


def _final_norm(model: PreTrainedModel) -> Any:
    found = [norm for name in FINAL_NORMS for norm in submodules(model.base_model, (name,))]
    return found[0] if found else None


def _with_small_residual(hidden_states: Tensor) -> Tensor:
    """Scale to a mean square of 1/4096. Norms undo the scale, so what a layer adds does not change."""
    wide = hidden_states.float()
    return (wide * torch.rsqrt(wide.pow(2).mean()) / 64).to(hidden_states.dtype)
