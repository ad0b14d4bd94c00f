"""Which runner a model gets."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from ..kernels import warm_up_in_background
from ..kernels.backend import HALF_PRECISION
from ..model_state import state_of
from . import cuda_graph
from .eager import EagerRunner
from .mask_probe import mask_maker_for
from .model_walk import every_module, every_parameter, has_adapters
from .positions import LengthDependentRotary

logger = logging.getLogger(__name__)

UPFRONT = 4096  # the most slots reserved in advance; a cache that must grow has its graphs captured again
BRANCHES = 256  # room for branches behind the text
ASIDE = 256  # room for a text that the draft reads aside


@contextmanager
def runner_for(
    model: PreTrainedModel, role: str, rows: int, slots: int, runtime: str, kernels: bool | str = "auto"
) -> Iterator[EagerRunner]:
    """A runner for one generation.

    Args:
        model: the model to run.
        role: "target" or "draft", for error messages.
        rows: the batch size.
        slots: the longest a row may get; room is made for it in advance where that is reasonable.
        runtime: "eager", "graph", or "auto": graphs on CUDA where the model can be captured, eager elsewhere.
        kernels: run what is recognised of the model through our kernels; "auto": in half precision.
    """
    ours = model.dtype in HALF_PRECISION if kernels == "auto" else bool(kernels)
    reason = "" if runtime == "eager" else why_not_captured(model)
    if ours and runtime != "eager" and not reason:
        warm_up_in_background(model.device)
    masks = mask_maker_for(model, role)
    if reason and runtime != "auto":
        raise ValueError(f"runtime={runtime!r} cannot run the {role} {type(model).__name__}: {reason}")
    if reason and model.device.type == "cuda":
        _say_once(model, role, reason)
    if runtime == "eager" or reason or cuda_graph.why_it_syncs(model, masks):
        yield EagerRunner(model, masks)
        return
    layers = cuda_graph.layers_for(model, masks, rows) if ours else "plain"
    runner = cuda_graph.take(model, masks, rows, layers)
    aside = ASIDE if role == "draft" else 0
    runner.reserve(rows, min(slots + BRANCHES + aside, UPFRONT))
    yield runner
    cuda_graph.give_back(runner, rows)


def _say_once(model: PreTrainedModel, role: str, reason: str) -> None:
    state = state_of(model)
    if state.warned_eager != reason:
        state.warned_eager = reason
        logger.warning("the %s %s runs eagerly, without CUDA graphs: %s", role, type(model).__name__, reason)


def why_not_captured(model: PreTrainedModel) -> str:
    """Why this model must run eagerly; empty if it need not."""
    devices = {parameter.device for parameter in every_parameter(model)}
    if any(device.type != "cuda" for device in devices):
        return "it is not on a CUDA device"
    if len(devices) > 1:
        return "it is split over several devices"
    if getattr(model, "hf_quantizer", None) is not None:
        return "it is quantised"
    if has_adapters(model):
        return "it has adapters, which may be switched between calls"
    if LengthDependentRotary(model):
        return "its rotary embedding depends on the length of the text"
    if any(_is_watched(module) for module in every_module(model)):
        return "it has forward hooks, which a replay would not call"
    return ""


def _is_watched(module: torch.nn.Module) -> bool:
    """Whether someone looks on. The hooks with which transformers collects hidden states do not count: they stay for
    good once a model has been asked for some, and a capture records what they collect.
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return "forward" in module.__dict__ or any(not _is_transformers_own(hook) for hook in hooks)


def _is_transformers_own(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def release(model: PreTrainedModel) -> None:
    """Free the cache and the graphs that are kept for a model's next generation."""
    cuda_graph.drop(model)
