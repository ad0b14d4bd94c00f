"""`fuse(model)` joins weights in one storage; inside `fused(model)` a model runs through the kernels.

Both leave the model as transformers knows it: the same modules, the same parameters, the same state dict. Outside
`fused` it runs its own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..kept_checks import load_check, save_check
from ..kernels.attention_interface import NAME, UNCAPPED, one_pass, original_attention, override_attention, register
from ..kernels.backend import FLOATS
from ..kernels.parallel_build import build_in_parallel, is_dry_run
from ..model_state import every_module, state_of
from .attention import AttentionForward
from .base import Call, Replacement, ThreadForward, untouched
from .kept_errors import KeptErrors, using
from .lora import base_of
from .norm import Ahead
from .product import Product, Tuned, Weights
from .products import LinearForward, PlainProduct, is_plain, quantised_layers, tensors_to_join
from .recognise import calls_registered_attention, later_calls, readers_of_one_input, recognise, record_calls
from .storage import join, joined, separate

SMALLEST_PRODUCT = 1 << 18  # elements of a weight; smaller ones are not worth autotuning
CHECK = "errors of modules"  # under which they are kept
_FREED_BEFORE_RETURNING = 1 << 30  # bytes of old weights that the allocator may keep


class Recipe(NamedTuple):
    """How a model runs through the kernels."""

    structure: int  # hash of the model's structure when it was examined
    tuned: Tuned
    ahead: Ahead
    replacements: dict[nn.Module, Replacement]
    attention: str  # the implementation that the config names meanwhile
    readers: list[Sequence[nn.Linear]]  # linear layers whose weights may be joined
    quantised: dict[nn.Module, Product]  # single linear layers with quantised weights


def fuse(model: PreTrainedModel) -> Callable[[], None]:
    """Join the weights of q, k and v in one storage, and those of gate and up, where they are plain linear layers.

    The parameters remain and become views of the joint storage: `state_dict`, `save_pretrained`, adapters, tying and
    training see no difference. Only one group of weights at a time needs extra memory. No other thread may run the
    model meanwhile, except through SpecBranch, which waits.

    Args:
        model: any model; what is not recognised is left alone.

    Returns:
        A function that gives every parameter a storage of its own again.

    Example:
        >>> from hf_specbranch import load_demo_pair
        >>> target, _, _ = load_demo_pair()
        >>> undo = fuse(target)
        >>> undo()
    """
    with state_of(model).kernel_lock:  # held from the first look on: another thread may have joined half of a group
        readers = [[base_of(layer) for layer in layers] for layers in readers_of_one_input(model)]
        groups = [group for layers in readers for group in tensors_to_join(layers)]
        _join_all(groups)

    def undo() -> None:
        with state_of(model).kernel_lock:
            for group in groups:
                separate(group)

    return undo


def _join_all(groups: Iterable[Sequence[nn.Parameter]]) -> None:
    freed = 0
    for group in groups:
        if join(group):
            freed += sum(parameter.numel() * parameter.element_size() for parameter in group)
        if freed > _FREED_BEFORE_RETURNING:
            freed = _return_memory(group[0])
    if freed:
        _return_memory(group[0])


@contextmanager
def fused(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Run a model through the kernels: norms, rotary, gated activations, attention, small products.

    Modules are recognised by their structure, and each replacement is checked once against the module's own forward.
    What is not recognised runs as it is. Afterwards, also after an exception, the model is exactly as before. Enter
    the context outside of a graph capture: the first time runs the model. One thread at a time runs a model through
    the kernels; in other threads it runs its own code meanwhile.

    Args:
        model: the model; `fuse` it first, or q, k and v are separate products.

    Example:
        >>> import torch
        >>> from hf_specbranch import load_demo_pair
        >>> target, _, _ = load_demo_pair()
        >>> with torch.no_grad(), fused(target):
        ...     logits = target(torch.tensor([[1, 2, 3]])).logits
    """
    if torch.is_autocast_enabled(model.device.type):  # it chooses dtypes by its own rules
        yield model
        return
    config = model.config.get_text_config(decoder=True)
    with ExitStack() as stack:
        stack.enter_context(state_of(model).kernel_lock)
        original, thread = original_attention(config), get_ident()
        recipe = _recipe(model, original)
        recipe.tuned.find_weights = partial(_weights, model, recipe.readers)
        stack.callback(setattr, recipe.tuned, "find_weights", dict)  # holds no weights that the model may drop
        one_pass.begin()
        stack.callback(one_pass.end)
        stack.callback(_forget, recipe.ahead)
        hook = model.register_forward_pre_hook(lambda *_: _forget(recipe.ahead) if get_ident() == thread else None)
        stack.callback(hook.remove)
        if recipe.attention != original:
            stack.enter_context(override_attention(config, recipe.attention))
        for module, forward in list(_valid(model, recipe)):  # all are examined before the first is changed
            module.forward = ThreadForward(module, forward)
            stack.callback(module.__dict__.pop, "forward", None)
        yield model


def can_build_in_parallel(model: PreTrainedModel, passes: Callable[[], object] = lambda: None) -> bool:
    """Return whether a dry run of a pass has no side effects: only kernels write to the cache, and there are no hooks.

    Args:
        model: the model.
        passes: run in the dry run of the module check, so that their kernels are built at the same time; their side
            effects must not matter. They are run only if the attention of every layer is replaced.
    """
    if torch.is_autocast_enabled(model.device.type):  # the model runs its own code
        return False
    config = model.config.get_text_config(decoder=True)
    with state_of(model).kernel_lock:  # outside of it, hooks and forwards may be those of another thread's check
        if not all(untouched(module) for module in every_module(model)):
            return False
        replacements = list(_valid(model, _recipe(model, original_attention(config), passes)))
    return _replaces_all_attention(model, (replacement for _, replacement in replacements))


def _replaces_all_attention(model: PreTrainedModel, replacements: Iterable[Replacement]) -> bool:
    """Return whether the attention of every layer is replaced."""
    layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    return sum(isinstance(replacement, AttentionForward) for replacement in replacements) == layers


def _forget(ahead: Ahead) -> None:
    """Drop what was computed for one pass."""
    ahead.forget()
    one_pass.forget()


def _recipe(model: PreTrainedModel, implementation: str, passes: Callable[[], object] = lambda: None) -> Recipe:
    modules = tuple((id(module), type(module)) for module in every_module(model))
    structure = hash((modules, implementation, model.dtype, model.device))
    recipe: Recipe | None = state_of(model).kernel_recipe
    if recipe is None or recipe.structure != structure:
        if is_dry_run():
            raise RuntimeError("a model cannot be examined in a dry run")

        register()
        kept = KeptErrors(model, load_check(model, CHECK))
        calls = later_calls(model, kept.called) if kept.earlier else record_calls(model)
        examine = partial(_examine, model, calls, implementation, structure)
        if kept.earlier:  # nothing is compared, and a dense model is not even run
            found = _compare(examine, kept)
            _build_kernels(model, lambda: found, passes)
        else:
            _build_kernels(model, examine, passes)
            found = _compare(examine, kept)
        if not kept.earlier and kept.is_complete:
            save_check(model, CHECK, kept.to_keep(calls))
        recipe = state_of(model).kernel_recipe = found
    return recipe


def _build_kernels(model: PreTrainedModel, examine: Callable[[], Recipe], passes: Callable[[], object]) -> None:
    """Build the kernels of the module check and of passes in parallel."""

    def check_and_passes() -> None:  # in a dry run every replacement passes the check
        examined = state_of(model).kernel_recipe = examine()
        if _replaces_all_attention(model, examined.replacements.values()):  # others may read all of a cache
            passes()

    try:
        build_in_parallel(check_and_passes, model.device, new_model=True)
    finally:
        state_of(model).kernel_recipe = None


def _compare(examine: Callable[[], Recipe], errors: KeptErrors) -> Recipe:
    with using(errors):
        return examine()


def _examine(model: PreTrainedModel, calls: dict[nn.Module, Call], implementation: str, structure: int) -> Recipe:
    tuned, ahead, readers = Tuned(), Ahead(), _joinable_readers(model)
    tuned.find_weights = partial(_weights, model, readers)  # all of a shape: one alone would stay in a cache
    replacements = recognise(model, calls, tuned, ahead, implementation == "sdpa")
    attention = implementation  # not used where every layer's attention is replaced
    if not _replaces_all_attention(model, replacements.values()):
        attention = registered_attention(model, implementation)
    tuned.find_weights = dict
    _forget(ahead)
    bypassed = {inner for replacement in replacements.values() for inner in replacement.bypassed}
    quantised = quantised_layers([module for module in every_module(model) if module not in bypassed], tuned)
    return Recipe(structure, tuned, ahead, replacements, attention, readers, quantised)


def registered_attention(model: PreTrainedModel, implementation: str) -> str:
    """Return the name under which our attention behaves as the model's own, if the model then computes the same."""
    ours = {"sdpa": UNCAPPED, "eager": NAME}.get(implementation, implementation)
    alike = ours == implementation or calls_registered_attention(model, (implementation, ours))
    return ours if alike else implementation


def _valid(model: PreTrainedModel, recipe: Recipe) -> Iterator[tuple[nn.Module, Replacement]]:
    """Yield the replacements that may be used now: hooks may have been added since the model was examined."""
    bypassed: set[nn.Module] = set()
    for module, replacement in recipe.replacements.items():
        if "forward" not in module.__dict__ and all(untouched(inner) for inner in replacement.bypassed):
            bypassed.update(replacement.bypassed)
            yield module, replacement
    for module in every_module(model):
        if module in recipe.quantised:
            if module not in bypassed and untouched(module):
                yield module, LinearForward(recipe.quantised[module])
        elif type(module) is nn.Linear and module not in bypassed and "forward" not in module.__dict__:
            if module.weight.is_cuda and module.weight.numel() >= SMALLEST_PRODUCT and module.weight.dtype in FLOATS:
                yield module, LinearForward(PlainProduct([module], recipe.tuned))


def _joinable_readers(model: PreTrainedModel) -> list[Sequence[nn.Linear]]:
    """Return the plain linear layers that could be one product, all or none of them with a bias; without adapters."""
    return [
        layers
        for layers in ([base_of(layer) for layer in layers] for layers in readers_of_one_input(model))
        if all(is_plain(layer) for layer in layers) and len({layer.bias is None for layer in layers}) == 1
    ]


def _weights(model: PreTrainedModel, readers: list[Sequence[nn.Linear]]) -> Weights:
    """Return all weights by shape, joined ones as one."""
    wholes = [whole for layers in readers if (whole := joined([layer.weight for layer in layers])) is not None]
    weights: Weights = {}
    for weight in (*wholes, *(module.weight for module in every_module(model) if type(module) is nn.Linear)):
        weights.setdefault((weight.shape, weight.dtype), []).append(weight.detach())
    return weights


def _return_memory(parameter: nn.Parameter) -> int:
    """Return freed weights to the device: no later request of a joint weight fits them."""
    if parameter.is_cuda:
        torch.cuda.empty_cache()
    return 0
