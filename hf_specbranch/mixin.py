"""How `generate()` reaches the loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from .checks import check_inputs, check_model, check_request
from .config import SpecBranchConfig
from .decoding.engine import Call, speculate
from .decoding.hooks import SpeculationHook
from .decoding.loop import Parts
from .decoding.planning import forget
from .decoding.policies import POLICIES
from .heads.resolve import resolve_head
from .runners.choose import release
from .stats import SpecBranchStats

Model = TypeVar("Model", bound=PreTrainedModel)


@dataclass
class Remembered:
    """What was given to `specbranch(model, ...)`. A plain object, so that the draft is no submodule."""

    draft: PreTrainedModel | None = None
    head: Any = None


@dataclass
class Request:
    """What one `generate()` call asks of us; it travels beside transformers' own arguments."""

    config: SpecBranchConfig
    draft: PreTrainedModel | None
    hooks: Sequence[SpeculationHook]
    generator: torch.Generator | None
    fills_cache: bool  # past_key_values was passed in
    observer: Callable[[Parts], Parts] | None


# `generate()` takes some arguments by position; by name they are easier to look at.
_POSITIONAL = [
    name for name in inspect.signature(GenerationMixin.generate).parameters if name not in ("self", "kwargs")
]
ASSISTANT_TOKENS = 20  # what transformers takes where a generation config does not say `num_assistant_tokens`
_REQUEST: ContextVar[Request | None] = ContextVar("specbranch_request", default=None)


class SpecBranchMixin(GenerationMixin):
    """Gives a causal language model branch-parallel speculative decoding behind its own `generate()`.

    Attach it to a loaded model with `specbranch(model)`, or put it before the model class:

    Example:
        >>> from transformers import LlamaForCausalLM
        >>> class FastLlama(SpecBranchMixin, LlamaForCausalLM):
        ...     pass
    """

    specbranch_stats: SpecBranchStats | None = None
    _specbranch_memory: Remembered = Remembered()

    @torch.no_grad()
    def generate(
        self,
        *args: Any,
        assistant_model: PreTrainedModel | None = None,
        specbranch: SpecBranchConfig | dict[str, Any] | str | Path | bool | None = None,
        length_head: Any = None,
        speculation_hooks: Sequence[SpeculationHook] = (),
        generator: torch.Generator | None = None,
        speculation_observer: Callable[[Parts], Parts] | None = None,
        **kwargs: Any,
    ) -> Any:
        """`GenerationMixin.generate` with every argument it has, and a few more.

        Args:
            assistant_model: the draft; by default the one given to `specbranch(model, draft=...)`.
            specbranch: settings, as a `SpecBranchConfig`, a dict, or the path of a JSON file. By default those
                in the generation config, or else the defaults. False: transformers' own decoding.
            length_head: says how much of a line to send; a `LengthHead`, a folder, a repository id (with
                `@revision` if it is to be pinned), "auto" or a callable. Overrides the settings' own.
            speculation_hooks: further `SpeculationHook`s, asked before the built-in ones.
            generator: source of randomness for sampling; by default torch's global one.
            speculation_observer: looks on, e.g. to draw a timeline; see `hf_specbranch.timeline`.

        Returns:
            What plain `generate()` returns. With `return_dict_in_generate=True`, also `stats`; these are
            always on `model.specbranch_stats` too.

        Example:
            >>> from hf_specbranch import load_demo_pair, specbranch
            >>> target, draft, tokenizer = load_demo_pair()
            >>> inputs = tokenizer("def add(a, b):", return_tensors="pt")
            >>> out = specbranch(target).generate(**inputs, assistant_model=draft, max_new_tokens=8)
        """
        arguments = {**dict(zip(_POSITIONAL, args)), **kwargs}
        draft = arguments.pop("assistant_model", assistant_model)
        if specbranch is False:
            return super().generate(assistant_model=draft, **arguments)
        memory = self._specbranch_memory
        draft = draft if draft is not None else memory.draft
        config = _settings(specbranch, arguments, self.generation_config)
        if draft is None and specbranch is None and POLICIES[config.policy].drafts:
            return super().generate(**arguments)
        head = length_head if length_head is not None else config.length_head or memory.head
        request = Request(
            config=replace(config, length_head=head),
            draft=draft,
            hooks=tuple(speculation_hooks),
            generator=generator,
            fills_cache=arguments.get("past_key_values") is not None,
            observer=speculation_observer,
        )
        token = _REQUEST.set(request)
        try:
            # Any assistant makes transformers take the assisted road; which draft is used, the request says.
            return super().generate(assistant_model=draft if draft is not None else self, **arguments)
        finally:
            _REQUEST.reset(token)

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: Any, generation_mode_kwargs: Any
    ) -> None:
        request = _REQUEST.get()
        if request is None:
            super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
            return
        model = cast(PreTrainedModel, self)
        check_request(model, request.draft, request.config, generation_mode, generation_config, generation_mode_kwargs)
        if request.draft is not None and POLICIES[request.config.policy].forks:
            given = request.config.length_head
            head = resolve_head(given, model, request.draft, generation_mode_kwargs.get("tokenizer"))
            if isinstance(head, SpeculationHook):
                request.hooks, head = (*request.hooks, head), None
            request.config = replace(request.config, length_head=head)

    def _assisted_decoding(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        inputs_tensor: torch.Tensor | None = None,
        assistant_model: PreTrainedModel | None = None,
        assistant_tokenizer: Any = None,
        tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        request = _REQUEST.get()
        if request is None:
            return super()._assisted_decoding(
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                inputs_tensor=inputs_tensor,
                assistant_model=assistant_model,
                assistant_tokenizer=assistant_tokenizer,
                tokenizer=tokenizer,
                **model_kwargs,
            )
        model = cast(PreTrainedModel, self)
        check_inputs(model, input_ids, model_kwargs)
        output, self.specbranch_stats = speculate(
            Call(
                model=model,
                draft=request.draft,
                config=request.config,
                hooks=request.hooks,
                generator=request.generator,
                input_ids=input_ids,
                processors=logits_processor,
                criteria=stopping_criteria,
                generation_config=generation_config,
                streamer=streamer,
                model_kwargs=model_kwargs,
                fills_cache=request.fills_cache,
                observer=request.observer,
            )
        )
        return output

    def detach_specbranch(self) -> Any:
        """Undo `specbranch(model)`: the object is again what it was, and forgets draft and head."""
        original = getattr(type(self), "_specbranch_original", None)
        if original is None:
            raise TypeError(f"{type(self).__name__} is a SpecBranchMixin by its definition: there is nothing to detach")
        for name in ("_specbranch_memory", "specbranch_stats"):
            self.__dict__.pop(name, None)
        release(cast(PreTrainedModel, self))
        forget(cast(PreTrainedModel, self))
        self.__class__ = original
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the original class with the mixin attached anew; the attached class has no address."""
        original = getattr(type(self), "_specbranch_original", None)
        if original is None:
            return super().__reduce_ex__(protocol)
        return _attached_blank, (original,), self.__dict__


def specbranch(model: Model, draft: PreTrainedModel | None = None, head: Any = None) -> Model:
    """Attach SpecBranch to a loaded model.

    The same object comes back, with the same weights, class name and methods; only its `generate()` now
    understands `assistant_model` as a SpecBranch draft. Attaching again is harmless, and may name another
    draft or head; `model.detach_specbranch()` undoes it.

    Args:
        model: a decoder-only transformers model.
        draft: a smaller model with the same tokenizer, used whenever `generate()` is given none.
        head: a length head (a `LengthHead`, a folder, a repository id or "auto"), used whenever `generate()` is
            given none.

    Returns:
        `model` itself.

    Example:
        >>> from hf_specbranch import load_demo_pair, specbranch
        >>> target, draft, tokenizer = load_demo_pair()
        >>> model = specbranch(target, draft=draft)
        >>> model is target
        True
    """
    check_model(model, "target")
    if draft is not None:
        check_model(draft, "draft")
    if not isinstance(model, GenerationMixin):
        raise TypeError(f"{type(model).__name__} cannot generate text: load it with AutoModelForCausalLM")
    if not isinstance(model, SpecBranchMixin):
        model.__class__ = _attached_class(cast(Any, type(model)))
    attached = cast(SpecBranchMixin, model)
    before = attached._specbranch_memory
    attached._specbranch_memory = Remembered(
        draft=draft if draft is not None else before.draft, head=head if head is not None else before.head
    )
    return model


@cache
def _attached_class(original: Any) -> Any:
    """A subclass that passes for the original: same name, same module."""
    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_specbranch_original": original,
    }
    return type(original.__name__, (SpecBranchMixin, original), namespace)


def _attached_blank(original: Any) -> Any:
    attached = _attached_class(original)
    return attached.__new__(attached)


def _settings(given: Any, arguments: dict[str, Any], model_config: GenerationConfig | None) -> SpecBranchConfig:
    """The settings of a call: its own, else the generation config's, else the defaults."""
    passed = arguments.get("generation_config")
    if given is None or given is True:
        candidates = (getattr(config, "specbranch", None) for config in (passed, model_config))
        given = next((candidate for candidate in candidates if candidate is not None), {})
    if isinstance(given, SpecBranchConfig):
        config = given
    elif isinstance(given, dict):
        config = SpecBranchConfig.from_dict(given)
    elif isinstance(given, (str, Path)):
        config = SpecBranchConfig.from_json_file(given)
    else:
        raise TypeError(f"specbranch={given!r}: expected a SpecBranchConfig, a dict, a JSON file's path or a bool")
    if config.max_draft_length == "auto":
        lengths = (arguments.get("num_assistant_tokens"), *map(_assistant_tokens, (passed, model_config)))
        config = replace(config, max_draft_length=next((length for length in lengths if length), "auto"))
    return config


def _assistant_tokens(config: GenerationConfig | None) -> int | None:
    """What a generation config says of the draft length, if anybody has set it: pipelines fill in defaults."""
    length: int | None = getattr(config, "num_assistant_tokens", None)
    return None if length == ASSISTANT_TOKENS else length
