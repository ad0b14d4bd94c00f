"""Routers of mixtures of experts through our kernels: softmax over the logits of the experts, and the k highest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.backend import FLOATS
from ..kernels.linear import MOST_ROWS
from ..kernels.routing import Routing, Touched, route, route_reference
from .base import Call, Replacement
from .check import tolerance
from .product import Tuned


class Handoff:
    """Carries what the routing kernel found, besides what a router returns, to the experts that run next."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Touched] | None = None

    def put(self, routing: Routing) -> None:
        """Keep the touched experts of these choices."""
        self._last = routing.chosen, routing.touched

    def take(self, chosen: Tensor) -> Touched | None:
        """Return the touched experts of exactly these choices, if they are known; once."""
        last, self._last = self._last, None
        return last[1] if last is not None and last[0] is chosen else None


class RouterForward(Replacement):
    """Replaces a router: logits of all experts, the k experts with the highest, and their weights.

    Args:
        module: the router.
        tuned: computes the product.
        handoff: to the experts.
        normalised: the weights of a token add up to 1.
        outputs: one call's outputs of the module, which ours have the order and dtypes of.
    """

    def __init__(
        self, module: Any, tuned: Tuned, handoff: Handoff, normalised: bool, outputs: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        super().__init__()
        self.module, self.tuned, self.handoff, self.normalised = module, tuned, handoff, normalised
        self.order = order_of(outputs)
        logits, weights, _ = (outputs[position] for position in self.order)
        self.logits_dtype, self.weights_dtype = logits.dtype, weights.dtype

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if x.shape[0] > MOST_ROWS:
            output: tuple[Tensor, ...] = type(self.module).forward(self.module, hidden_states)
            return output
        logits = self.tuned.split_k(x, self.module.weight, getattr(self.module, "bias", None))
        routing = route(logits, self.module.top_k, self.normalised, self.weights_dtype)
        self.handoff.put(routing)
        ours = routing.logits.to(self.logits_dtype), routing.weights, routing.chosen
        return tuple(ours[self.order.index(position)] for position in range(3))

    def compared(self, output: Any) -> Tensor:
        """Return logits, chosen logits and weights, in order: where two experts are nearly tied, either may be chosen.

        The chosen logits of both are looked up in rounded logits, so rounding may exchange the experts but not more.
        """
        logits, weights, chosen = (output[position] for position in self.order)
        picked = logits.gather(1, chosen).sort(-1, descending=True).values
        together = torch.cat([logits, picked, weights.sort(-1, descending=True).values], dim=-1)
        return together.to(self.module.weight.dtype)


def order_of(outputs: Any) -> tuple[int, int, int]:
    """Return where logits, weights and chosen experts are among the outputs of a router, by dtype and shape.

    Example:
        >>> order_of((torch.zeros(5, 2, dtype=torch.long), torch.zeros(5, 2), torch.zeros(5, 8)))
        (2, 1, 0)
    """
    shapes = [tuple(each.shape) for each in outputs]
    (chosen,) = [place for place, each in enumerate(outputs) if not each.is_floating_point()]
    (weights,) = [place for place in range(3) if place != chosen and shapes[place] == shapes[chosen]]
    return 3 - chosen - weights, weights, chosen


def looks_like_router(module: Any) -> bool:
    """Return whether a module has a weight [E, H], at most a bias, no other state, and a number of choices."""
    parameters = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    weight = parameters.get("weight", ())
    return (
        isinstance(getattr(module, "top_k", None), int)
        and len(weight) == 2
        and parameters in ({"weight": weight}, {"weight": weight, "bias": weight[:1]})
        and not any(True for _ in module.buffers())
        and module.weight.dtype in FLOATS
    )


def recognise_router(module: Any, call: Call, tuned: Tuned, handoff: Handoff) -> RouterForward | None:
    """Return a replacement if this looks like a router and its weights are a softmax that we compute."""
    if not looks_like_router(module):
        return None
    output = call.output
    try:
        logits, weights, _ = (output[position] for position in order_of(output))
        ordered = weights.float().sort(-1, descending=True).values
        for normalised in (True, False):
            expected = route_reference(logits, module.top_k, normalised, torch.float32).weights
            if (ordered - expected).norm() <= tolerance(module.weight.dtype) * expected.norm():
                return RouterForward(module, tuned, handoff, normalised, output)
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError):  # the outputs of something else
        pass
    return None


def chosen_experts(output: Any) -> tuple[Tensor, Tensor]:
    """Return the chosen experts and their weights from the outputs of any router."""
    _, weights, chosen = order_of(output)
    return output[chosen], output[weights]


def router_of(module: Any) -> nn.Module | None:
    """Return the router of a mixture, under either of its names."""
    found = getattr(module, "gate", None) or getattr(module, "router", None)
    return found if isinstance(found, nn.Module) else None
