"""The way from `generate()` to the decoding loop.

`SpecBranchMixin.generate` shows all of it. It decides what drafts (`request.make_request`), refuses what cannot work,
and calls transformers' own `generate()` with the `Request` in place of the assistant model. Transformers prepares
inputs, processors, stopping criteria and cache, and calls back `_validate_generation_mode`, which loads the length
head, and `_assisted_decoding`, which runs the decoding loop. What SpecBranch cannot serve, transformers' own decoding
does, after one warning.

`specbranch(model)` gives a loaded model this mixin (`attach.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import CandidateGenerator

from .attachment import Attachment, restore_class
from .config import SpecBranchConfig
from .decoding.call import Call, Request, warming_up
from .decoding.engine import speculate
from .decoding.hooks import SpeculationHook
from .decoding.loop import Parts
from .decoding.policies import POLICIES
from .decoding.warm_up import capture_stages
from .fallback import FallBack, seeded_from
from .heads.model import resolve_head
from .model_state import agreed, decided, walked_once
from .padding_check import check_padded_batches
from .plain_calls import why_left_alone
from .planning.knowledge import forget
from .request import (
    MergedSettings,
    by_name,
    complete_request,
    make_request,
    remedy_if_nothing_serves,
    tokenizers_of,
    why_candidates_are_theirs,
)
from .runtime.selection import release
from .stats import SpecBranchStats
from .warm_up import warm_up

logger = logging.getLogger(__name__)


class SpecBranchMixin(GenerationMixin):
    """Gives a causal language model branch-parallel speculative decoding in its own `generate()`.

    Attach it to a loaded model with `specbranch(model)`, or put it before the model class:

    Example:
        >>> from transformers import LlamaForCausalLM
        >>> class FastLlama(SpecBranchMixin, LlamaForCausalLM): ...
    """

    specbranch_stats: SpecBranchStats | None = None
    _specbranch_memory: Attachment = Attachment()
    warm_up_specbranch = warm_up

    @torch.no_grad()
    @walked_once()
    def generate(
        self,
        *args: Any,
        assistant_model: torch.nn.Module | CandidateGenerator | None = None,
        specbranch: SpecBranchConfig | dict[str, Any] | str | Path | bool | None = None,
        length_head: Any = None,
        speculation_hooks: Sequence[SpeculationHook] = (),
        generator: torch.Generator | None = None,
        speculation_observer: Callable[[Parts], Parts] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate as `GenerationMixin.generate` does, with all its arguments and a few more.

        Without a draft the target decodes alone, through the same loop. Transformers' own decoding runs with
        `specbranch=False`, where the call names another source of candidates (`prompt_lookup_num_tokens` and the like),
        and where SpecBranch cannot serve the call (beam search, `use_cache=False`, a quantized cache and the like). If
        a draft or settings were given, one warning says why.

        Args:
            assistant_model: a draft model or a `CandidateGenerator`; by default what `specbranch()` was given.
            specbranch: settings, as a `SpecBranchConfig`, a dict, or the path of a JSON file. By default those
                in the generation config, or else the defaults. False: transformers' own decoding.
            length_head: decides how much of a draft to send; a `LengthHead`, a folder, a repository id (with
                `@revision` to pin it), "auto" or a callable. Overrides the settings' own.
            speculation_hooks: further `SpeculationHook`s; they decide before the built-in ones.
            generator: source of randomness for sampling; by default torch's global one. One number is drawn from it
                and seeds everything that this call draws. For transformers' own decoding, torch's global generators are
                seeded during the call and restored after it.
            speculation_observer: watches the decoding, e.g. to draw a timeline; see `hf_specbranch.timeline`.

        Returns:
            What plain `generate()` returns. With `return_dict_in_generate=True`, also `stats`; these are
            always on `model.specbranch_stats` too. Both are missing (None) where transformers' own decoding ran.

        Example:
            >>> from hf_specbranch import load_demo_pair, specbranch
            >>> target, draft, tokenizer = load_demo_pair()
            >>> inputs = tokenizer("def add(a, b):", return_tensors="pt")
            >>> out = specbranch(target).generate(**inputs, assistant_model=draft, max_new_tokens=8)
        """
        arguments = by_name(args, kwargs)
        assistant = arguments.pop("assistant_model", assistant_model)
        self.specbranch_stats = None
        if arguments.get("custom_generate") is not None:
            # Another decoding altogether: it is given all arguments, and may call this method again.
            ours = dict(specbranch=specbranch, length_head=length_head, speculation_hooks=speculation_hooks or None)
            ours |= dict(generator=generator, speculation_observer=speculation_observer)
            arguments |= {name: value for name, value in ours.items() if value is not None}
            return super().generate(assistant_model=assistant, **arguments)

        # 1. Calls that ask for transformers' own decoding.
        model, attachment = cast(PreTrainedModel, self), self._specbranch_memory
        settings = MergedSettings(arguments, self.generation_config)
        plain = partial(self._plain_generate, arguments, generator)
        if specbranch is False or settings.is_assistant:
            return plain(assistant)
        if theirs := why_candidates_are_theirs(settings, assistant):
            if specbranch is not None:
                self._warn_once(f"{theirs} names another source of candidates")
            return plain(assistant)

        # 2. What drafts, and with which settings. Rank 0 of a tensor parallel target has the draft, and decides.
        request = make_request(
            model, attachment, settings, assistant, specbranch,
            hooks=tuple(speculation_hooks), generator=generator, observer=speculation_observer,
        )  # fmt: skip
        request.asked, has_assistant = agreed(model, (request.asked, assistant is not None))
        if not request.asked and why_left_alone(model, settings):
            return plain()

        # 3. Validate: bad input is an error, what is unsupported a reason to fall back.
        tokenizers = tokenizers_of(settings, attachment, has_assistant)
        reason = decided(model, lambda: complete_request(model, request, settings, tokenizers))
        head = length_head if length_head is not None else request.config.length_head or attachment.head
        request.config = replace(request.config, length_head=head)

        # 4. Transformers prepares the call, and `_assisted_decoding` speculates.
        if not reason:
            try:
                return super().generate(assistant_model=request, **arguments)
            except FallBack as found:
                reason = str(found)

        # 5. Fall back.
        if request.asked:
            if has_assistant and (remedy := remedy_if_nothing_serves(settings)):
                raise ValueError(f"{reason}, and transformers' own assisted decoding refuses it too: {remedy}")
            self._warn_once(reason)
        return plain()

    def _plain_generate(
        self, arguments: dict[str, Any], generator: torch.Generator | None, assistant: Any = None
    ) -> Any:
        """Leave a call to transformers' own decoding."""
        if warming_up.get() is not None:
            raise ValueError("there is nothing to warm up: transformers' own decoding would run")
        if isinstance(assistant, CandidateGenerator):
            raise ValueError(f"transformers' own decoding takes no {type(assistant).__name__}: leave it out")
        with seeded_from(generator, cast(PreTrainedModel, self)):
            output = super().generate(assistant_model=assistant, **arguments)
        self.specbranch_stats = None  # a processor may have called `generate()` of this model meanwhile
        return output

    def _warn_once(self, reason: str) -> None:
        memory = self.__dict__.setdefault("_specbranch_memory", Attachment())
        if reason not in memory.warned:
            memory.warned.add(reason)
            logger.warning("%s falls back to transformers' own decoding: %s", type(self).__name__, reason)

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: Any, generation_mode_kwargs: Any
    ) -> None:
        """Load and check the length head. Transformers calls this before any work."""
        request = generation_mode_kwargs.get("assistant_model")
        if not isinstance(request, Request):
            super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
            return
        if generation_mode_kwargs.get("synced_gpus"):  # transformers knows how the model is distributed
            raise FallBack("SpecBranch does not run under ZeRO-3 or FSDP (synced_gpus)")
        tokenizer = generation_mode_kwargs.get("tokenizer")
        decided(cast(PreTrainedModel, self), lambda: self._load_head(request, tokenizer))

    def _load_head(self, request: Request, tokenizer: Any) -> None:
        given = request.config.length_head
        if given is not None and request.draft is not None and POLICIES[request.config.policy].forks:
            head = resolve_head(given, cast(PreTrainedModel, self), request.draft, tokenizer)
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
        assistant_model: PreTrainedModel | Request | None = None,
        assistant_tokenizer: Any = None,
        tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Run the decoding loop. Transformers calls this with the prepared call."""
        request = assistant_model
        if not isinstance(request, Request):
            return super()._assisted_decoding(
                input_ids, logits_processor, stopping_criteria, generation_config,
                synced_gpus=synced_gpus, streamer=streamer, inputs_tensor=inputs_tensor,
                assistant_model=assistant_model, assistant_tokenizer=assistant_tokenizer, tokenizer=tokenizer,
                **model_kwargs,
            )  # fmt: skip
        model = cast(PreTrainedModel, self)
        call = request.prepared(
            model, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs
        )
        try:
            if request.warm_up is None and (reason := call.why_prompt_is_refused()):
                raise ValueError(reason) if request.asked else FallBack(reason)
            if not call.is_unpadded:
                check_padded_batches(model)
            output, self.specbranch_stats = self._decode(call, request)
        except FallBack as found:  # from here, since transformers has prepared everything
            if request.warm_up is not None:
                raise
            if request.asked:
                self._warn_once(str(found))
            with seeded_from(request.generator, model):
                output = self._sample(
                    input_ids, logits_processor, stopping_criteria, generation_config,
                    synced_gpus=synced_gpus, streamer=streamer, **model_kwargs,
                )  # fmt: skip
            self.specbranch_stats = None  # the check of padded batches may have set it
        return output

    def _decode(self, call: Call, request: Request) -> tuple[Any, SpecBranchStats | None]:
        """Generate, or capture the stages of a warm-up; in one process, or on all ranks of a tensor parallel target."""

        def run(call: Call) -> tuple[Any, SpecBranchStats | None]:
            samples = bool(call.generation_config.do_sample)
            call = replace(call, draft=request.draft_of_call(call.model, samples, call.rows))
            return speculate(call) if request.warm_up is None else capture_stages(call, request.warm_up)

        if call.ranks is None:
            return run(call)
        from .decoding.parallel_ranks import on_all_ranks

        return on_all_ranks(call, run)

    def detach_specbranch(self) -> Any:
        """Undo `specbranch(model)`: restore the original class, forget draft and head, and release captured graphs."""
        original = getattr(type(self), "_specbranch_original", None)
        if original is None:
            raise TypeError(f"{type(self).__name__} is a SpecBranchMixin by its definition: there is nothing to detach")
        release(cast(PreTrainedModel, self))
        forget(cast(PreTrainedModel, self))
        restore_class(self)
        return self
