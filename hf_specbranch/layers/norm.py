"""RMSNorm and LayerNorm through our kernel, and the sums of a decoder layer that go with them."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..kernels.backend import FLOATS
from ..kernels.norm import FORMS, PLAIN, Norm, NormForm, norm_reference, normalise
from .base import Call, Replacement, untouched
from .check import agreeing, distinguishing_call, errors_of


class Around(NamedTuple):
    """What attention or MLP computes besides, in the launches of its products."""

    norm: Norm  # of its input
    residual: Tensor  # added to its output


class Ahead:
    """A norm that was computed before the module is called, by the kernel that computed its input.

    The replacements of one model share it during a pass.
    """

    def __init__(self) -> None:
        self.known: tuple[Tensor, nn.Module, Tensor] | None = None  # (x, norm, norm(x))
        self.sums_partials = False  # the next norm of the layer that runs sums split-K partials
        self.around: Around | None = None  # for the attention or the MLP that the layer calls next

    def forget(self) -> None:
        """Drop what was computed for one pass."""
        self.known, self.sums_partials, self.around = None, False, None

    def normed(self, x: Tensor, norm: Any, form: NormForm) -> Tensor:
        """Return norm(x), which the kernel that computed x may have computed too."""
        if self.known is not None and self.known[0] is x and self.known[1] is norm:
            return self.known[2]
        return normalise(x, parameters_of(norm, form))


class NormForward(Replacement):
    """Replaces RMSNorm or LayerNorm."""

    def __init__(self, module: nn.Module, ahead: Ahead, form: NormForm) -> None:
        super().__init__()
        self.module, self.ahead, self.form = module, ahead, form

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return self.ahead.normed(hidden_states, self.module, self.form)


def looks_like_norm(module: Any) -> bool:
    """Return whether a module has a weight, an epsilon, perhaps a bias, and nothing else."""
    return (
        (hasattr(module, "variance_epsilon") or hasattr(module, "eps"))
        and [name for name, _ in module.named_parameters()] in (["weight"], ["weight", "bias"])
        and module.weight.dim() == 1
        and module.weight.dtype in FLOATS
    )


def epsilon(norm: Any) -> float:
    """Return the epsilon of a norm, under either of its names."""
    value: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return value


def parameters_of(norm: Any, form: NormForm) -> Norm:
    """Return what the kernels need of a norm."""
    return Norm(norm.weight, epsilon(norm), form, getattr(norm, "bias", None))


def recognise_norms(calls: dict[nn.Module, Call], ahead: Ahead) -> dict[nn.Module, NormForward]:
    """Replace every norm by the form that is closest for its class, if that is close enough."""
    calls = {module: distinguishing_call(module, call) for module, call in calls.items() if looks_like_norm(module)}
    classes: dict[type, list[nn.Module]] = {}
    for module in calls:
        classes.setdefault(type(module), []).append(module)
    closest: dict[nn.Module, Replacement] = {}
    for modules in classes.values():
        form = _closest_form([modules[0], modules[len(modules) // 2], modules[-1]], calls)
        closest |= {module: NormForward(module, ahead, form) for module in modules}
    return {module: forward for module, forward in agreeing(closest, calls).items() if isinstance(forward, NormForward)}


def shared_form(forms: dict[nn.Module, NormForm], norms: list[nn.Module]) -> NormForm | None:
    """Return the form of all these norms; None if one is unknown or they differ."""
    if not all(norm in forms and untouched(norm) for norm in norms):
        return None
    kinds = {forms[norm] for norm in norms}
    return PLAIN if not kinds else kinds.pop() if len(kinds) == 1 else None


def _closest_form(modules: list[nn.Module], calls: dict[nn.Module, Call]) -> NormForm:
    """Compare the forms in torch: a kernel would be compiled for each."""
    variants = [{module: partial(_norm_in_torch, module, form=form) for module in modules} for form in FORMS]
    errors = [sum(errors_of(replacements, calls).values()) for replacements in variants]
    return FORMS[errors.index(min(errors))]


def _norm_in_torch(module: Any, hidden_states: Tensor, form: NormForm) -> Tensor:
    return norm_reference(hidden_states, parameters_of(module, form))
