"""Models with random weights, made where they will run."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

NOISE = 0.02  # of norms, biases and attention sinks


@torch.no_grad()
def random_model(
    config: PreTrainedConfig, device: torch.device | str, dtype: torch.dtype, seed: int = 0
) -> PreTrainedModel:
    """Return a model with random weights. They are created on the device in this dtype, so nothing is held twice.

    Matrices have the standard deviation that the config names. Norms, biases and attention sinks get noise too: an
    error in them would not show at ones and zeros.

    Args:
        config: of a causal language model.
        device: where the weights are created; "meta" creates shapes only.
        dtype: of the weights.
        seed: of the random weights.

    Example:
        >>> from hf_specbranch.bench.shapes import config_of
        >>> random_model(config_of("llama3.1-8b"), "meta", torch.bfloat16).num_parameters()
        8030261248
    """
    torch.manual_seed(seed)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("bias"):
            parameter.add_(torch.randn_like(parameter), alpha=NOISE)
    return model
