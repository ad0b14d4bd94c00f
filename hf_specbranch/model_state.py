"""What is remembered about a model between calls: one object per model, which goes when the model goes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import PreTrainedModel

from .plain_tensors import plain_tensors

Found = TypeVar("Found")


@dataclass
class ModelState:
    """Everything that earlier calls found out about one model.

    The parts of the package that fill a field own its type; this module imports none of them.

    Attributes:
        mask_makers: the masks under which the model computes the right logits, by state of its adapters, dtype and
            attention implementation (`runtime.mask_probe`).
        refusals: why a call without a draft is left to transformers, by the same (`plain_calls`).
        state_owners: the modules that keep recurrent states (`runtime.recurrent_modules`).
        padding_is_plain: whether padded batches are read as plain `generate()` reads them, by the same
            (`padding_check`).
        sync_reasons: why a forward cannot be captured, empty if it can, by state of the adapters
            (`runtime.cuda_graph`).
        kernel_checks: how kernels may be used (`runtime.self_check.KernelUse`), by the model's fingerprint when they
            were checked; the latest few.
        kernel_recipe: which modules our kernels replace, and how (`layers.fuse`).
        kernel_lock: held while a thread runs the model through our kernels, joins its weights, or compares passes.
        idle_runners: runners with their graphs and caches, waiting for the next call (`runtime.idle_runners`).
        padding_seconds: how long padding rows have taken, by rows of the batch without them (`decoding.row_padding`).
        warned_eager: the reason that was logged for running eagerly (`runtime.selection`).
        weight_bytes: by dtype of the model; counted once, since that takes a millisecond.
        copies: cheaper copies of the model, by their form, with what they were made from (`decoding.draft_copy`).
        form: of a model that is such a copy (`decoding.draft_copy.DraftForm`).
        shortlist: the tokens that such a copy scores, if not all (`layers.shortlist.Shortlist`).
        original: weakly refers to the model that it is a copy of.
        user: weakly refers to the call that runs such a copy.
        made_heads: drafts that read the hidden states of this target, as far as calls made them (`target_heads.calls`).
        translation: the last translation between the target's tokenizer and a draft's (`vocabularies`).
        pairs: what the planner knows of this target with each draft, by state of their adapters (`planning.online`).
        ranks: the processes of a tensor parallel model (`runtime.ranks.Ranks`).
    """

    mask_makers: dict[Hashable, Any] = field(default_factory=dict)
    refusals: dict[Hashable, str] = field(default_factory=dict)
    state_owners: Any = None
    padding_is_plain: dict[Hashable, bool] = field(default_factory=dict)
    sync_reasons: dict[Hashable, str] = field(default_factory=dict)
    kernel_checks: dict[int, str] = field(default_factory=dict)
    kernel_recipe: Any = None
    kernel_lock: Any = field(default_factory=RLock)
    idle_runners: list[Any] = field(default_factory=list)
    padding_seconds: dict[int, float] = field(default_factory=dict)
    warned_eager: str = ""
    weight_bytes: tuple[Any, int] | None = None
    copies: dict[Hashable, Any] = field(default_factory=dict)
    form: Any = None
    shortlist: Any = None
    original: Any = None
    user: Any = None
    made_heads: Any = None
    translation: Any = None
    pairs: WeakKeyDictionary[nn.Module, dict[Hashable, Any]] = field(default_factory=WeakKeyDictionary)
    ranks: Any = None


_STATES: WeakKeyDictionary[nn.Module, ModelState] = WeakKeyDictionary()
_lock = RLock()  # models may be used, and freed, in several threads


def state_of(model: nn.Module) -> ModelState:
    """What is remembered about this model.

    Example:
        >>> from hf_specbranch import load_demo_pair
        >>> target, _, _ = load_demo_pair()
        >>> state_of(target) is state_of(target)
        True
    """
    with _lock:
        state = _STATES.get(model)
        return _STATES.setdefault(model, ModelState()) if state is None else state


def ranks_of(model: nn.Module) -> Any:
    """Return the processes of a tensor parallel model (`runtime.ranks.Ranks`); None for a model in one process.

    The first call must come from all of these processes.
    """
    if getattr(model, "_tp_size", None) is None:
        return None
    from .runtime.ranks import Ranks, tensor_parallel_group

    state, group = state_of(model), tensor_parallel_group(cast(PreTrainedModel, model))
    if group is not None and state.ranks is None:
        state.ranks = Ranks(group, cast(PreTrainedModel, model).device)
    return state.ranks


def agreed(model: nn.Module, value: Found) -> Found:
    """Return what rank 0 of a tensor parallel model has found, on all of its ranks; in one process, the value."""
    ranks = ranks_of(model)
    return value if ranks is None else cast(Found, ranks.agree(value))


def decided(model: nn.Module, decide: Callable[[], Found]) -> Found:
    """Let rank 0 of a tensor parallel model decide, and return its result or raise its error on all ranks."""
    ranks = ranks_of(model)
    return decide() if ranks is None else cast(Found, ranks.agree_on(decide))


def every_state() -> list[ModelState]:
    """What is remembered about all models that exist."""
    with _lock:
        return list(_STATES.values())


def weight_bytes(model: nn.Module) -> int:
    """How many bytes of memory the weights and buffers of a model take, as they are stored: packed if quantised."""
    state, dtype = state_of(model), getattr(model, "dtype", None)
    if state.weight_bytes is None or state.weight_bytes[0] != dtype:
        state.weight_bytes = dtype, sum(tensor.nbytes for tensor in every_tensor(model))
    return state.weight_bytes[1]


# ---- all modules of a model


class Walk(NamedTuple):
    """All modules of a model, each once, and the dictionaries in which they hold parameters and buffers."""

    modules: list[nn.Module]
    parameters: list[dict[str, nn.Parameter | None]]
    buffers: list[dict[str, Tensor | None]]

    @classmethod
    def over(cls, modules: list[nn.Module]) -> Walk:
        """Return these modules, and what they hold themselves."""
        parameters = [module._parameters for module in modules if module._parameters]
        return cls(modules, parameters, [module._buffers for module in modules if module._buffers])

    def tensors(self) -> list[Tensor]:
        """Return all parameters and buffers. Tied ones appear more than once."""
        parameters = [tensor for held in self.parameters for tensor in held.values() if tensor is not None]
        return parameters + [tensor for held in self.buffers for tensor in held.values() if tensor is not None]


_walked: ContextVar[dict[nn.Module, Walk] | None] = ContextVar("walked", default=None)


@contextmanager
def walked_once() -> Iterator[None]:
    """Inside the context, `walk_of` goes through a model once: a call asks a dozen times."""
    token = _walked.set(_walked.get() or {})
    try:
        yield
    finally:
        _walked.reset(token)


def walk_of(model: nn.Module) -> Walk:
    """Return a module and all modules inside it, in the order of `model.modules()`."""
    walked = _walked.get()
    if walked is not None and model in walked:
        return walked[model]
    found: dict[nn.Module, None] = {}
    ahead: list[nn.Module | None] = [model]
    while ahead:
        module = ahead.pop()
        if module is not None and module not in found:
            found[module] = None
            if module._modules:
                ahead.extend(reversed(module._modules.values()))
    walk = Walk.over(list(found))
    return walk if walked is None else walked.setdefault(model, walk)


def every_module(model: nn.Module) -> list[nn.Module]:
    """Return a module and all modules inside it, each once, in the order of `model.modules()`.

    Example:
        >>> from torch import nn
        >>> inner = nn.ReLU()
        >>> [type(module).__name__ for module in every_module(nn.Sequential(inner, nn.Sequential(inner)))]
        ['Sequential', 'ReLU', 'Sequential']
    """
    return walk_of(model).modules


def every_parameter(model: nn.Module) -> list[nn.Parameter]:
    """Return all parameters of a model. Tied parameters appear more than once.

    Example:
        >>> from torch import nn
        >>> [tuple(parameter.shape) for parameter in every_parameter(nn.Linear(3, 2))]
        [(2, 3), (2,)]
    """
    held = walk_of(model).parameters
    return [parameter for parameters in held for parameter in parameters.values() if parameter is not None]


def every_buffer(model: nn.Module) -> list[Tensor]:
    """Return all buffers of a model. Shared buffers appear more than once.

    Example:
        >>> from torch import nn
        >>> len(every_buffer(nn.BatchNorm1d(2)))
        3
    """
    return [buffer for buffers in walk_of(model).buffers for buffer in buffers.values() if buffer is not None]


def every_tensor(model: nn.Module) -> list[Tensor]:
    """Return the plain tensors that hold all parameters and buffers of a model, each once."""
    return plain_tensors(walk_of(model).tensors())


# ---- PEFT adapters


def transformers_model(model: Any) -> Any:
    """Return the transformers model inside a PEFT wrapper, or anything else unchanged.

    Adapters such as LoRA replace modules in place, so the inner model computes with whichever adapter is active.
    """
    if isinstance(model, PreTrainedModel) or not isinstance(model, nn.Module):
        return model
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def draft_model(model: Any) -> Any:
    """Return the transformers model inside a draft, and refuse prompt learning.

    Only the PEFT wrapper's own `generate()` applies prompt learning, and a draft is never called through it.
    """
    inner = transformers_model(model)
    if inner is not model and getattr(model.active_peft_config, "is_prompt_learning", False):
        raise ValueError(
            f"the draft is a PEFT model with prompt learning ({model.active_peft_config.peft_type}): use an adapter "
            f"that changes layers, such as LoRA, or the base model"
        )
    return inner


def has_adapters(model: nn.Module) -> bool:
    """Return whether PEFT has put adapters into this model, by a wrapper or by `model.add_adapter()`."""
    return bool(getattr(model, "peft_config", None))


def adapter_state(model: nn.Module) -> Hashable:
    """Return which adapters are active, disabled and merged, and their scaling, layer by layer; None without adapters.

    What is remembered about a model holds for one such state.
    """
    if not has_adapters(model):
        return None
    state = []
    for module in every_module(model):
        if type(module).__module__.startswith("peft."):
            disabled = bool(getattr(module, "disable_adapters", False))
            active = () if disabled else tuple(getattr(module, "active_adapters", ()))
            merged = tuple(getattr(module, "merged_adapters", ()))
            scaling = getattr(module, "scaling", None)
            scales = tuple(scaling.get(name) for name in active) if isinstance(scaling, dict) else ()
            numbers = tuple(scale for scale in scales if isinstance(scale, int | float))
            state.append((type(module).__name__, active, disabled, merged, numbers))
    return tuple(state)


def is_lora(module: Any) -> bool:
    """Return whether PEFT has put plain LoRA around a linear layer: W x + sum of scale * B (A x), and no variant."""
    kind = type(module)
    return (
        (kind.__module__, kind.__qualname__) == ("peft.tuners.lora.layer", "Linear")
        and not getattr(module, "lora_variant", None)
        and not any(module.use_dora.values())
    )


def adapters_in_use(module: Any) -> list[str]:
    """Return the adapters that a LoRA layer adds to its base layer now, in the order in which it adds them."""
    if module.disable_adapters or module.merged:
        return []
    return [name for name in module.active_adapters if name in module.lora_A]


def walk_in_use(model: nn.Module) -> Walk:
    """Return all modules inside a model, except those of LoRA adapters that take no part in a pass."""
    walk = walk_of(model)
    if not has_adapters(model):
        return walk
    unused: set[nn.Module] = set()
    for module in walk.modules:
        if is_lora(module):
            used, layer = adapters_in_use(module), cast(Any, module)
            for held in (layer.lora_A, layer.lora_B, layer.lora_dropout):
                unused.update(held[name] for name in held if name not in used)
    return Walk.over([module for module in walk.modules if module not in unused])


def unmerge_disabled(model: nn.Module) -> None:
    """Unmerge adapters that are both merged and disabled, as their first pass would."""
    if not has_adapters(model):
        return
    for module in every_module(model):
        if getattr(module, "disable_adapters", False) and getattr(module, "merged_adapters", ()):
            if callable(unmerge := getattr(module, "unmerge", None)):
                with state_of(model).kernel_lock:
                    unmerge()


def why_adapters_need_plain(model: PreTrainedModel) -> str:
    """Return why the active adapters work only with transformers' own decoding; empty if they work with ours too.

    Prompt learning prepares the model's inputs itself. Adapters chosen per row (`adapter_names=`) or by position
    (aLoRA, X-LoRA) reach the layers through hooks that expect the passes of plain `generate()`.
    """
    prepare = model.__dict__.get("prepare_inputs_for_generation")
    if prepare is not None and getattr(prepare, "__func__", None) is not type(model).prepare_inputs_for_generation:
        return "prepare_inputs_for_generation is replaced on the model, as PEFT does for prompt learning"
    if has_adapters(model) and any(_has_peft_hooks(module) for module in every_module(model)):
        return "the call chooses adapters per row or per position (adapter_names=, aLoRA or X-LoRA)"
    return ""


def _has_peft_hooks(module: nn.Module) -> bool:
    hooks = (getattr(hook, "func", hook) for hook in module._forward_pre_hooks.values())
    return any(str(getattr(hook, "__module__", "")).startswith("peft.") for hook in hooks)
