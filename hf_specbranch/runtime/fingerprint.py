"""What tells whether a model is still the one that a CUDA graph was captured from."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from ..kernels.attention_interface import original_attention
from ..model_state import adapter_state, modules_in_use, plain_parts

PLAIN = (nn.Parameter, torch.Tensor)


def fingerprint(model: PreTrainedModel) -> int:
    """Return a number that changes with all that a CUDA graph has baked in: modules, addresses, dtypes, adapters, modes.

    Every call computes it, so it walks over the model once.
    """
    modules, addresses, dtypes = [], [], []
    for module in modules_in_use(model):
        modules.append((id(module), type(module), module.training))
        for held in (module._parameters, module._buffers):
            for tensor in held.values():
                if tensor is None:
                    continue
                for part in (tensor,) if type(tensor) in PLAIN else plain_parts(tensor):
                    addresses.append(part.data_ptr())
                    dtypes.append(part.dtype)
    modes = (
        original_attention(model.config.get_text_config(decoder=True)),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.get_float32_matmul_precision(),
        torch.is_inference_mode_enabled(),  # its tensors cannot be written outside inference mode
    )
    return hash((tuple(modules), tuple(addresses), tuple(dtypes), modes, adapter_state(model)))
