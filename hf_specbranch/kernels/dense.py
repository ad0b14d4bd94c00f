"""y = x W^T + bias with few rows, by the kernel that its plan names: with tensor cores, without, or torch's own."""

from __future__ import annotations

from torch import Tensor

from . import gemv
from .activation import MlpActivation
from .deferred import DeferredNorm, WithResidual, computed
from .gated import Activation, gated_product
from .gemv import Around
from .linear import Partials, Plan, activated_product, linear_split_k


def dense_product(
    x: Tensor | DeferredNorm,
    weight: Tensor,
    bias: Tensor | None,
    plan: Plan | None,
    activation: MlpActivation | None = None,
    gate: Activation | None = None,
) -> Tensor | Partials:
    """Compute x W^T + bias, or act(x W^T + bias), or act(gate) * up.

    Args:
        x: [..., K].
        weight: [N, K]; with a gate, its rows before those of the up projection.
        bias: [N] or None.
        plan: from `autotune`; None: torch.
        activation: of an MLP without a gate.
        gate: of an MLP with a gate.

    Returns:
        [..., N], [..., N / 2] with a gate, or partials where the plan splits the inner dimension.
    """
    if plan is not None and plan.warps > 0:
        value, norm = x if isinstance(x, DeferredNorm) else (x, None)
        return gemv.gemv(value, weight, bias, plan, Around(norm, activation, gate))
    if gate is not None:
        return gated_product(computed(x), weight, bias, gate, plan)
    if activation is not None:
        return activated_product(computed(x), weight, bias, activation, plan)
    return linear_split_k(computed(x), weight, bias, plan)


def add_product(
    residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan | None, scale: float
) -> WithResidual | None:
    """Compute residual + scale * (x W^T + bias), if the kernel of the plan adds residuals; None otherwise."""
    if plan is None or plan.warps == 0:
        return None
    return WithResidual(gemv.gemv(x, weight, bias, plan, Around(residual=residual, scale=scale)))
