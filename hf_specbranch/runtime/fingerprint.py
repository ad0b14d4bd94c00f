"""What tells whether a model is still the one that a CUDA graph was captured from."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from ..kernels.attention_interface import original_attention
from ..model_state import adapter_state, walk_in_use
from ..plain_tensors import plain_parts

PLAIN = {nn.Parameter, torch.Tensor}


def fingerprint(model: PreTrainedModel) -> int:
    """Return a number that changes with what a CUDA graph has baked in: modules, addresses, dtypes, adapters, modes.

    Every call computes it, so it must be quick.
    """
    walk = walk_in_use(model)
    modules, weights = walk.modules, walk.tensors()
    if not PLAIN.issuperset(map(type, weights)):
        weights = [part for tensor in weights for part in plain_parts(tensor)]
    structure = tuple(map(id, modules)), tuple(map(type, modules)), tuple([module.training for module in modules])
    memory = tuple([tensor.data_ptr() for tensor in weights]), tuple([tensor.dtype for tensor in weights])
    modes = (
        original_attention(model.config.get_text_config(decoder=True)),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.get_float32_matmul_precision(),
        torch.is_inference_mode_enabled(),  # its tensors cannot be written outside inference mode
    )
    return hash((structure, memory, modes, adapter_state(model)))
