"""Mixtures of experts through our kernels: the experts, and the block that adds a shared expert to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.backend import FLOATS, serves
from ..kernels.experts import Addend, Experts, Gate, apply_experts, apply_experts_reference, fits
from ..kernels.linear import MOST_ROWS, Partials
from ..kernels.routing import list_touched
from .base import Call, Replacement, untouched
from .norm import Ahead
from .router import Handoff, chosen_experts, router_of

PARTS = {"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"}


class ExpertsForward(Replacement):
    """Replaces the experts of a mixture, for few tokens; more of them run the module's own code.

    Args:
        module: the experts.
        gate: how they combine gate and up.
        handoff: from the router.
    """

    def __init__(self, module: Any, gate: Gate, handoff: Handoff) -> None:
        super().__init__()
        self.module, self.gate, self.handoff = module, gate, handoff

    def __call__(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = self.partials(hidden_states, chosen, weights)
        return out.sum() if isinstance(out, Partials) else out

    def partials(self, x: Tensor, chosen: Tensor, weights: Tensor, addend: Addend | None = None) -> Tensor | Partials:
        """Return the weighted sum of the chosen experts' outputs, and the addend.

        Args:
            x: [T, H].
            chosen: [T, k].
            weights: [T, k].
            addend: added to the sum.
        """
        touched, experts = self.handoff.take(chosen), _weights_of(self.module, self.gate)
        if fits(x, experts, addend):
            if touched is None:
                touched = list_touched(chosen, weights, experts.down.shape[0])
            return apply_experts(x, touched, experts, addend)
        if x.shape[0] <= MOST_ROWS and not serves(x.device):
            return apply_experts_reference(x, chosen, weights, experts, addend)
        out: Tensor = type(self.module).forward(self.module, x, chosen, weights)
        if addend is None:
            return out
        return out + (addend.values if addend.gate is None else torch.sigmoid(addend.gate) * addend.values)


class MixtureForward(Replacement):
    """Replaces the block of router, experts and shared expert, so that the next norm sums the partials.

    Args:
        module: the block.
        experts: the replacement of its experts.
        ahead: shared by the replacements of the model.
        gives_weights: the block also returns the weights of the chosen experts.
    """

    gives_partials = True
    has_ties = True

    def __init__(self, module: Any, experts: ExpertsForward, ahead: Ahead, gives_weights: bool) -> None:
        super().__init__([module.experts])
        self.module, self.experts, self.ahead, self.gives_weights = module, experts, ahead, gives_weights
        self.router = router_of(module)

    def __call__(self, hidden_states: Tensor) -> Any:
        summed, self.ahead.sums_partials = self.ahead.sums_partials, False
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        shared: Any = _shared_expert(self.module)
        addend = None
        if shared is not None:
            gate = getattr(self.module, "shared_expert_gate", None)
            addend = Addend(shared(x), None if gate is None else gate(x))
        assert self.router is not None
        chosen, weights = chosen_experts(self.router(x))
        out = self.experts.partials(x, chosen, weights, addend)
        if isinstance(out, Partials):
            out = Partials(out.terms, hidden_states.shape, out.dtype)
        result = out.sum() if isinstance(out, Partials) and not summed else out
        if isinstance(result, Tensor):
            result = result.view(hidden_states.shape)
        return (result, weights) if self.gives_weights else result


def looks_like_experts(module: Any) -> bool:
    """Return whether a module has weights of gate and up and of down for all experts, and nothing else."""
    parameters = dict(module.named_parameters())
    if not {"gate_up_proj", "down_proj"} <= set(parameters) <= PARTS:
        return False
    first, second = parameters["gate_up_proj"].shape, parameters["down_proj"].shape
    if len(first) != 3 or len(second) != 3 or len({parameter.dtype for parameter in parameters.values()}) > 1:
        return False
    plain, transposed = (second[0], 2 * second[2], second[1]), (second[0], second[2], 2 * second[1])
    return tuple(first) in (plain, transposed) and module.gate_up_proj.dtype in FLOATS


def looks_like_mixture(module: Any) -> bool:
    """Return whether a module has a router, experts, at most one shared expert, and nothing else."""
    experts = getattr(module, "experts", None)
    if not isinstance(experts, nn.Module) or not looks_like_experts(experts) or router_of(module) is None:
        return False
    used = [experts, router_of(module), _shared_expert(module), getattr(module, "shared_expert_gate", None)]
    return all(any(child is each for each in used) for child in module.children())


def recognise_experts(module: Any, handoff: Handoff) -> ExpertsForward | None:
    """Return a replacement if this looks like the experts of a mixture, with an activation that we compute."""
    gate = _gate_of(module) if looks_like_experts(module) else None
    return None if gate is None else ExpertsForward(module, gate, handoff)


def recognise_mixture(module: Any, call: Call, handoff: Handoff, ahead: Ahead) -> MixtureForward | None:
    """Return a replacement if this looks like the block of a mixture."""
    if not looks_like_mixture(module) or not untouched(module.experts):
        return None
    experts = recognise_experts(module.experts, handoff)
    gives_weights = isinstance(call.output, tuple)
    if experts is None or (gives_weights and len(call.output) != 2):
        return None
    return MixtureForward(module, experts, ahead, gives_weights)


def _shared_expert(module: Any) -> nn.Module | None:
    found = getattr(module, "shared_experts", None) or getattr(module, "shared_expert", None)
    return found if isinstance(found, nn.Module) else None


def _weights_of(module: Any, gate: Gate) -> Experts:
    """Return the weights of experts as [E, 2 * I, H] and [E, H, I], whichever way they are stored."""
    first, second = module.gate_up_proj, module.down_proj
    if first.shape[1] != 2 * second.shape[2]:
        first, second = first.mT, second.mT
    first_bias, second_bias = (getattr(module, name, None) for name in ("gate_up_proj_bias", "down_proj_bias"))
    return Experts(first, second, first_bias, second_bias, gate)


@torch.no_grad()
def _gate_of(module: Any) -> Gate | None:
    """Return how experts combine gate and up, judged by values on a probe; None if in no way that we know."""
    both = 5 * torch.randn((64, 16), generator=torch.Generator().manual_seed(0), device="cpu")
    forms = [Gate("silu"), Gate("gelu_tanh")]
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if isinstance(alpha, int | float) and isinstance(limit, int | float):
        forms.append(Gate("clamped", True, float(alpha), float(limit)))
    try:
        if hasattr(module, "_apply_gate"):
            expected = module._apply_gate(both)
        else:
            expected = module.act_fn(both[:, :8]) * both[:, 8:]
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return None
    return next((form for form in forms if torch.allclose(form(both), expected, rtol=1e-4, atol=1e-5)), None)
