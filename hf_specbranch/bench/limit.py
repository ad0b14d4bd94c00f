"""The limit of decoding: a token cannot take less time than reading the weights that it needs."""

from __future__ import annotations

from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..layers.packed_linear import PackedLinear
from .timing import timed

COPY_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}  # large enough to leave every cache
# Names of the same figure in different configs.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")


class TokenCost(NamedTuple):
    """What one token needs of a model's weights."""

    parameters: int  # of the whole model
    active_parameters: int  # without the experts that a token does not choose
    bytes: int  # that a pass over one token reads


def token_cost(model: PreTrainedModel) -> TokenCost:
    """Count the weights that a pass over one token reads. The model may be on the meta device.

    Of an embedding table it reads one row, so tables do not count, except one that is also the output layer. Of a
    mixture of experts it reads the chosen experts.
    """
    output = model.get_output_embeddings()
    read_in_full = None if output is None else output.weight
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)} - {read_in_full}
    config = model.config.get_text_config(decoder=True)
    experts, chosen = _figure(config, _EXPERTS), _figure(config, _ACTIVE_EXPERTS)
    parameters = active = read = 0
    for name, weight in model.named_parameters():
        count = weight.numel()
        parameters += count
        if experts and chosen and _is_of_experts(name, weight, experts):
            count = count * min(chosen, experts) // experts
        active += count
        read += 0 if weight in tables else count * weight.element_size()
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]  # of a copy of a draft
    read += sum(buffer.nbytes for module in packed for buffer in module.buffers())
    return TokenCost(parameters, active, read)


def _is_of_experts(name: str, weight: nn.Parameter, experts: int) -> bool:
    """Return whether a parameter holds the weights or biases of all routed experts of a layer."""
    return weight.dim() >= 2 and len(weight) == experts and (weight.dim() == 3 or "experts" in name.split("."))


def _figure(config: Any, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def copy_bandwidth(device: torch.device, size: int | None = None, repeats: int = 10) -> float:
    """Return the bytes per second that a large copy on one device reads and writes."""
    size = size or COPY_BYTES.get(device.type, COPY_BYTES["cpu"])
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    return 2 * size / median(timed(lambda: destination.copy_(source), device, repeats))
