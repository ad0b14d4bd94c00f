"""Through all parts of a model. Every generation does so several times, and `modules()` builds a name for each part."""

from __future__ import annotations

from torch import Tensor, nn


def every_module(model: nn.Module) -> list[nn.Module]:
    """A module and all within it, each once, in the order of `model.modules()`.

    Example:
        >>> from torch import nn
        >>> inner = nn.ReLU()
        >>> [type(module).__name__ for module in every_module(nn.Sequential(inner, nn.Sequential(inner)))]
        ['Sequential', 'ReLU', 'Sequential']
    """
    found: dict[nn.Module, None] = {}
    ahead: list[nn.Module | None] = [model]
    while ahead:
        module = ahead.pop()
        if module is not None and module not in found:
            found[module] = None
            if module._modules:
                ahead.extend(reversed(module._modules.values()))
    return list(found)


def every_parameter(model: nn.Module) -> list[nn.Parameter]:
    """All parameters; what is tied is met more than once.

    Example:
        >>> from torch import nn
        >>> [tuple(parameter.shape) for parameter in every_parameter(nn.Linear(3, 2))]
        [(2, 3), (2,)]
    """
    held = (module._parameters.values() for module in every_module(model) if module._parameters)
    return [parameter for parameters in held for parameter in parameters if parameter is not None]


def every_buffer(model: nn.Module) -> list[Tensor]:
    """All buffers, likewise.

    Example:
        >>> from torch import nn
        >>> len(every_buffer(nn.BatchNorm1d(2)))
        3
    """
    held = (module._buffers.values() for module in every_module(model) if module._buffers)
    return [buffer for buffers in held for buffer in buffers if buffer is not None]
