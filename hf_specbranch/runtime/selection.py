"""Which models can run, and on which runner: CUDA graphs where a model can be captured, eager elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from ..config import MEMORY_BUDGET
from ..kernels import warm_up_in_background
from ..kernels.backend import HALF_PRECISION, serves
from ..layers.base import ThreadForward
from ..model_state import adapter_state, every_module, every_parameter, state_of, unmerge_disabled
from . import capture_trial, cuda_graph, idle_runners
from .eager import EagerRunner, MaskMaker, layer_kinds
from .fingerprint import fingerprint
from .mask_probe import mask_maker_for
from .pieces import only_places
from .positions import length_dependent
from .recurrent_cache import is_recurrent

logger = logging.getLogger(__name__)

MOST_RESERVED = 4096  # slots reserved in advance at most; when a cache grows, its graphs are captured again
BRANCH_SLOTS = 256  # room for branches after the text
SPARE_SLOTS = 256  # room for a text that the draft reads for the planner; more is reserved where nothing moves then
# Two vocabularies of one tokenizer may differ by padding: Qwen2.5 has 151,936 entries, or 152,064.
LARGEST_PADDING = 0.01


@contextmanager
def runner_for(
    model: PreTrainedModel,
    role: str,
    rows: int,
    slots: int,
    runtime: str,
    kernels: bool | str = "auto",
    budget: float = MEMORY_BUDGET,
) -> Iterator[EagerRunner]:
    """Provide a runner for one generation, and keep it for the next one.

    Args:
        model: the model to run.
        role: "target" or "draft", for error messages.
        rows: the batch size.
        slots: the longest that a row may get; reserved in advance, up to `MOST_RESERVED`.
        runtime: "eager", "graph", or "auto": graphs on CUDA where the model can be captured, eager elsewhere.
        kernels: run the layers that are recognised through our kernels; "auto": in half precision only.
        budget: the fraction of the GPU's memory that idle runners may take, all together.
    """
    unmerge_disabled(model)
    use_kernels = _uses_kernels(model, kernels)
    reason = "" if runtime == "eager" else why_not_captured(model)
    if use_kernels and runtime != "eager" and not reason:
        warm_up_in_background(model.device, model.dtype)
    masks = masks_for(model, role)
    if reason:  # compressed weights are unpacked by a hook in the first pass, which removes itself
        reason = why_not_captured(model)
    if reason and runtime != "auto":
        raise ValueError(f"runtime={runtime!r} cannot run the {role} {type(model).__name__}: {reason}")
    if reason and model.device.type == "cuda":
        _warn_once(model, role, reason)
    if runtime != "eager" and not reason:
        reason = _why_not_as(role, model) or capture_trial.why_it_syncs(model, masks)
    if runtime == "eager" or reason:
        eager = EagerRunner(model, masks)
        eager.why_eager = reason if model.device.type == "cuda" else ""
        eager.skips_autograd = _can_skip_autograd(model)
        try:
            yield eager
        finally:
            if eager.skips_autograd:
                _take_out_of_inference_mode(model)
        return
    now = fingerprint(model)
    layers = cuda_graph.layers_for(model, masks, rows, now) if use_kernels else "plain"
    runner = cuda_graph.take(model, masks, rows, layers, now)
    spare = SPARE_SLOTS if role == "draft" else 0
    runner.reserve(rows, min(slots + BRANCH_SLOTS + spare, MOST_RESERVED))
    yield runner
    cuda_graph.give_back(runner, budget)


def _can_skip_autograd(model: PreTrainedModel) -> bool:
    """Whether passes may run in torch's inference mode: on a CPU, and if no hook is shown tensors that it may keep.

    A pass of the embedded target took 8% less time there: torch prepares no tensor for autograd.
    """
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    if model.device.type != "cpu" or any(modes):  # autocast keeps the weights that it casts
        return False
    if any(type(weight) is not torch.nn.Parameter or weight.is_meta for weight in every_parameter(model)):
        return False  # weights that are offloaded are replaced in every pass
    return not any(module._forward_hooks or module._forward_pre_hooks for module in every_module(model))


def _take_out_of_inference_mode(model: PreTrainedModel) -> None:
    """Replace tensors that modules have kept from a pass in inference mode, which no later training could use."""
    for module in every_module(model):
        for kept in (module._buffers, module.__dict__):
            for name, value in list(kept.items()):
                if isinstance(value, torch.Tensor) and value.is_inference():
                    kept[name] = value.clone()


def idle_for(model: PreTrainedModel, runtime: str, kernels: bool | str) -> list[idle_runners.Idle]:
    """Return the idle runners that `runner_for` may provide with these settings and adapters, of all batch sizes."""
    if runtime == "eager":
        return []
    checks = state_of(model).kernel_checks
    fused = _uses_kernels(model, kernels) and checks.get(fingerprint(model), "none") != "none"
    return idle_runners.waiting(model, "fused" if fused else "plain", hash(adapter_state(model)))


def _uses_kernels(model: PreTrainedModel, kernels: bool | str) -> bool:
    if model.device.type == "cuda" and not serves(model.device):  # there is no Triton, or an old one
        return False
    if getattr(model, "_tp_size", None) is not None:  # its layers communicate, so they run as transformers wrote them
        return False
    if getattr(model, "own_layers_only", False):  # they are given more than those that our kernels replace
        return False
    if _has_accelerate_hooks(every_module(model)):  # which are in the forwards that our kernels would replace
        return False
    return model.dtype in HALF_PRECISION if kernels == "auto" else bool(kernels)


def masks_for(model: PreTrainedModel, role: str) -> MaskMaker:
    """Return the mask maker that an earlier call found, or probe the model.

    The key is that of `mask_maker_for`. While another thread overrides the attention it finds nothing here, and
    `mask_maker_for`, which knows the model's original attention, finds it.
    """
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    key = adapter_state(model), model.dtype, attention
    return state_of(model).mask_makers.get(key) or mask_maker_for(model, role)


def _warn_once(model: PreTrainedModel, role: str, reason: str) -> None:
    state = state_of(model)
    if state.warned_eager != reason:
        state.warned_eager = reason
        logger.warning("the %s %s runs eagerly, without CUDA graphs: %s", role, type(model).__name__, reason)


def why_not_captured(model: PreTrainedModel) -> str:
    """Return why this model must run eagerly; empty if it can be captured."""
    modules = every_module(model)
    in_pieces, home = _has_accelerate_hooks(modules), model.get_input_embeddings().weight.device
    devices = {home} if in_pieces else {home, *(weight.device for weight in every_parameter(model))}
    if any(device.type != "cuda" for device in devices):
        return "it is not on a CUDA device"
    if len(devices) > 1:
        return "it is split over several devices"
    if in_pieces and _keeps_states_in_cache(model):
        return "it has recurrent layers, and is split over several devices or offloaded"
    if length_dependent(modules):
        return "its rotary embedding depends on the length of the text"
    touched = [m for m in modules if m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__]
    if any(map(_has_foreign_hooks, touched)):
        return "it has forward hooks, which a replay would not call"
    return ""


def _why_not_as(role: str, model: PreTrainedModel) -> str:
    """Return why a model that can be captured is not, as target or as draft (`role`); empty if it is.

    When a side branch survives, its entries in the KV caches of all layers move, in one stage of one device.
    """
    if role != "draft" or not _has_accelerate_hooks(every_module(model)):
        return ""
    spread = {weight.device for weight in every_parameter(model) if not weight.is_meta}
    return "its layers are on several devices" if len(spread) > 1 else ""


def _has_accelerate_hooks(modules: list[torch.nn.Module]) -> bool:
    return any(["_hf_hook" in module.__dict__ for module in modules])


def _has_foreign_hooks(module: torch.nn.Module) -> bool:
    """Return whether a module has hooks or a replaced forward that come neither from transformers nor from us.

    transformers collects hidden states with hooks, which stay once a model has returned some. They do not count,
    since a capture records what they collect. Nor do the forwards of tensor parallel layers, which communicate, and
    the hooks by which accelerate splits a model, which is then captured in pieces.
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    forward = module.__dict__.get("forward")
    if _has_accelerate_hooks([module]):
        replaced = not only_places(module)
    else:
        replaced = forward is not None and not isinstance(forward, ThreadForward) and not _is_harmless(forward)
    return replaced or any(not _is_harmless(hook) for hook in hooks)


def _is_harmless(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(("transformers.", "hf_specbranch."))


def release(model: PreTrainedModel) -> None:
    """Free the KV caches and the graphs that are kept for a model's next generation, and those of its copies."""
    idle_runners.drop(model)
    state_of(model).made_heads = None
    for _, copies in state_of(model).copies.values():
        for copy in copies:
            idle_runners.drop(copy)


def is_compiled(model: Any) -> bool:
    """Return whether the user has compiled a model: `torch.compile(model)`, `model.compile()`, or its forward."""
    return (
        hasattr(model, "_orig_mod")
        or getattr(model, "_compiled_call_impl", None) is not None
        or hasattr(getattr(model, "forward", None), "_torchdynamo_orig_callable")
    )


def is_offloaded(model: PreTrainedModel) -> bool:
    """Return whether accelerate brings all weights that are on the meta device where they are needed, pass by pass."""
    held = [
        module
        for module in every_module(model)
        if any(w is not None and w.is_meta for w in module._parameters.values())
    ]
    return all(hasattr(module, "_hf_hook") for module in held)


def check_model(model: PreTrainedModel, role: str) -> None:
    """Refuse a model that cannot be a target or a draft (`role`)."""
    name = type(model).__name__
    if is_compiled(model):
        raise ValueError(
            f"the {role} is under torch.compile, which would compile it again for each shape: pass the model as it was "
            f"loaded, on a GPU its stages are captured as CUDA graphs"
        )
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"the {role} must be a transformers PreTrainedModel, not {name}")
    if model.config.is_encoder_decoder:
        raise ValueError(f"the {role} {name} is an encoder-decoder model: SpecBranch needs decoder-only models")
    if getattr(model, "_is_stateful", False) and not _keeps_states_in_cache(model):
        raise ValueError(
            f"the {role} {name} keeps a recurrent state outside of its cache, where it cannot be rolled back: choose "
            f"another model"
        )
    if role == "draft" and getattr(model, "_tp_size", None) is not None:
        raise ValueError(
            f"the draft {name} is tensor parallel: load it without tp_plan and distributed_config, since rank 0 runs "
            f"it alone"
        )
    is_placed = role == "target" or not model.get_input_embeddings().weight.is_meta
    if any([parameter.is_meta for parameter in every_parameter(model)]) and not (is_placed and is_offloaded(model)):
        raise ValueError(f"the {role} {name} has weights on the meta device: load them before generating")


def _keeps_states_in_cache(model: PreTrainedModel) -> bool:
    return any(map(is_recurrent, layer_kinds(model.config.get_text_config(decoder=True))))


def check_pair(target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any, draft_tokenizer: Any) -> None:
    """Refuse a draft with another vocabulary, unless both tokenizers are known (`vocabularies.translation_for`)."""
    ours, theirs = (model.config.get_text_config(decoder=True) for model in (target, draft))
    names = f"target {_name(target)}: {ours.vocab_size} entries, draft {_name(draft)}: {theirs.vocab_size}"
    if ours.vocab_size == theirs.vocab_size or (tokenizer is not None and draft_tokenizer is not None):
        return
    padding = abs(ours.vocab_size - theirs.vocab_size) / max(ours.vocab_size, theirs.vocab_size)
    if padding > LARGEST_PADDING or ours.model_type != theirs.model_type:
        raise ValueError(
            f"vocabulary sizes differ ({names}): pass the target's tokenizer= and the draft's assistant_tokenizer=, or "
            f"choose a draft that shares the target's tokenizer"
        )


def _name(thing: Any) -> str:
    return getattr(thing, "name_or_path", "") or type(thing).__name__
