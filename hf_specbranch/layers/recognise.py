"""Which modules of a model the kernels can replace.

Candidates are recognised by their submodules (q_proj, k_proj, v_proj, o_proj; gate_proj, up_proj, down_proj; a weight
and an epsilon; experts and a router; a convolution and a decay). A few tokens then run through the model. What the
submodules do not tell, such as which dimensions are rotated together, is found by trial. The output of every candidate
is compared with that of its replacement forward on the same input, and a module that differs is not replaced. No names
of models or classes are used. Modules that cannot be examined run their own code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels.attention_interface import override_attention
from ..kernels.parallel_build import is_dry_run
from ..model_state import every_module
from .angles import recognise_angles
from .attention import AttentionForward, attention_inputs, recognise_attention
from .base import Call, Record, Replacement
from .check import agreeing, agreeing_variants, evaluating, tolerance
from .decoder_layer import looks_like_layer, recognise_layers
from .delta_net import delta_inputs, recognise_delta_net
from .mixture import looks_like_experts, looks_like_mixture, recognise_experts, recognise_mixture
from .mlp import mlp_inputs, recognise_mlp
from .norm import Ahead, looks_like_norm, recognise_norms
from .product import Tuned
from .products import product_of
from .router import Handoff, looks_like_router, recognise_router

logger = logging.getLogger(__name__)

Found = TypeVar("Found")
TOKENS = 16  # of the check: kernels compiled for these run up to 16 queries over any cache of a multiple of 16 slots


def recognise(
    model: PreTrainedModel, calls: dict[nn.Module, Call], tuned: Tuned, ahead: Ahead, uncapped: bool
) -> dict[nn.Module, Replacement]:
    """Return replacement forwards for the modules that compute what the kernels compute, each checked on its own input.

    Args:
        model: the model.
        calls: inputs and outputs of its modules, from `record_calls`.
        tuned: computes products for the replacements.
        ahead: what the replacements share during a pass.
        uncapped: the model's attention ignores soft caps and sinks.
    """
    unknown: set[str] = set()

    def examined(what: str, find: Callable[[], Found]) -> Found | None:
        """Return what is found; None if examining these modules fails for any reason but a lack of memory."""
        try:
            return find()
        except torch.OutOfMemoryError:  # the runtime frees memory and retries
            raise
        except Exception as error:
            if what not in unknown and not is_dry_run():  # what modules compute in a dry run is noise
                logger.warning("%s of %s: not examined, own code runs: %r", what, type(model).__name__, error)
            unknown.add(what)
            return None

    norms = examined("norms", partial(recognise_norms, calls, ahead)) or {}
    forms = {module: forward.form for module, forward in norms.items()}
    candidates: dict[nn.Module, Replacement] = {}
    attentions: dict[nn.Module, list[AttentionForward]] = {}
    handoff = Handoff()
    for module, call in calls.items():
        name = type(module).__name__
        if variants := examined(name, partial(recognise_attention, module, tuned, ahead, forms, uncapped)):
            attentions[module] = variants
            continue
        found = examined(name, partial(_recognise_module, module, call, tuned, ahead, handoff))
        if found is not None:
            candidates[module] = found
    angles = examined("rotary angles", partial(recognise_angles, model)) or {}
    replacements: dict[nn.Module, Replacement] = {**norms, **angles, **agreeing(candidates, calls)}
    replacements |= agreeing_variants(attentions, calls)
    layers = [module for module in calls if looks_like_layer(module)]
    structures = examined("layers", partial(recognise_layers, model, layers, forms, ahead)) or {}
    return replacements | agreeing_variants(structures, calls)


def _recognise_module(
    module: nn.Module, call: Call, tuned: Tuned, ahead: Ahead, handoff: Handoff
) -> Replacement | None:
    """Return a replacement for an MLP, a part of a mixture or a delta network."""
    return (
        recognise_mlp(module, tuned, ahead)
        or recognise_router(module, call, tuned, handoff)
        or recognise_experts(module, handoff)
        or recognise_mixture(module, call, handoff, ahead)
        or recognise_delta_net(module, partial(product_of, tuned=tuned), ahead)
    )


def readers_of_one_input(model: PreTrainedModel) -> list[list[Any]]:
    """Return the layers that could be one product: q, k and v; gate and up; all that a delta network projects."""
    return [list(layers) for module in every_module(model) if len(layers := _inputs(module)) > 1]


def _inputs(module: nn.Module) -> Any:
    return attention_inputs(module) or mlp_inputs(module) or delta_inputs(module)


def _is_candidate(module: nn.Module) -> bool:
    looks = (looks_like_norm, looks_like_layer, looks_like_router, looks_like_experts, looks_like_mixture)
    return any(look(module) for look in looks) or bool(_inputs(module))


@torch.no_grad()
def record_calls(
    model: PreTrainedModel, is_candidate: Callable[[nn.Module], bool] = _is_candidate
) -> dict[nn.Module, Call]:
    """Run a few tokens through the model and record the inputs and outputs of the candidates, in their order.

    Another thread may run the model at the same time. Its calls are not recorded: they name a cache that is in use.
    """
    records: dict[nn.Module, Record] = {}
    thread = get_ident()

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if get_ident() == thread:
            records.setdefault(module, Record(args, kwargs, output))

    with evaluating(model), ExitStack() as stack:
        for module in every_module(model):
            if is_candidate(module):
                stack.callback(module.register_forward_hook(record, with_kwargs=True).remove)
        model(input_ids=_few_tokens(model), use_cache=False)
    return {module: Call(partial(records.__getitem__, module)) for module in records}


def later_calls(model: PreTrainedModel, names: Sequence[str]) -> dict[nn.Module, Call]:
    """Return the calls of these modules, which are recorded when something of one of them is asked for.

    Args:
        model: the model.
        names: of the modules that `record_calls` has found in an earlier process, in their order.
    """
    found = dict(model.named_modules())
    recorded = cache(partial(record_calls, model))

    def record_of(module: nn.Module) -> Record:
        call = recorded()[module]
        return Record(call.args, call.kwargs, call.output)

    return {found[name]: Call(partial(record_of, found[name])) for name in names}


@torch.no_grad()
def calls_registered_attention(model: PreTrainedModel, names: tuple[str, str]) -> bool:
    """Return whether a model computes the same when its config names the second of two attentions.

    Some models look at the name and take a path of their own.
    """
    config = model.config.get_text_config(decoder=True)
    ids = _few_tokens(model)
    hidden = torch.ones((1, 1, TOKENS, TOKENS), dtype=torch.bool, device=ids.device).triu(1)
    hidden[..., TOKENS - 1, 1] = True
    mask = ~hidden
    if names[0] == "eager":
        mask = torch.zeros(hidden.shape, dtype=model.dtype, device=ids.device)
        mask.masked_fill_(hidden, torch.finfo(model.dtype).min)
    logits = []
    with evaluating(model):
        try:
            for name in names:
                with override_attention(config, name):
                    logits.append(model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float())
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError, AssertionError):
            return False
    return bool((logits[0] - logits[1]).norm() <= tolerance(model.dtype) * logits[0].norm())


def _few_tokens(model: PreTrainedModel) -> Tensor:
    weight = model.get_input_embeddings().weight
    ids: Tensor = (torch.arange(TOKENS, device=weight.device) * 7 + 1)[None] % weight.shape[0]
    return ids
