"""One `generate()` call: what it asks of SpecBranch (`Request`), and as transformers has prepared it (`Call`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import CandidateGenerator, GenerationMixin
from transformers.generation.logits_process import TemperatureLogitsWarper

from ..config import SpecBranchConfig
from ..corpus import LookupCorpus
from ..model_state import ranks_of
from ..progress import Progress
from ..runtime.kv_cache import past_length
from ..runtime.positions import LengthDependentRotary
from ..target_heads.base import TargetHead
from ..vocabularies import Translation
from .hooks import LengthHeadHook, SpeculationHook
from .loop import Parts
from .model_inputs import USUAL_INPUTS
from .policies import POLICIES
from .scoring import Processor, is_opaque, signature
from .text import Stopper

# How a model would say that it does more with a prompt than to read its tokens.
OWN_WAYS = ("_prefill", "prepare_inputs_for_generation")
# From this temperature on, tokens drawn from the draft were accepted at least as often as its likeliest ones
# (docs/benchmarks.md). Towards 0 the two become the same, and likeliest tokens need no test against `q`.
GREEDY_DRAFTS_BELOW = 0.3


warming_up: ContextVar[Progress | None] = ContextVar("warming_up", default=None)


@dataclass
class Request:
    """What one `generate()` call asks of SpecBranch.

    It is passed on as the call's `assistant_model`, so that it reaches the decoding of this call and no other: a
    processor or streamer may call `generate()` of this or any other model meanwhile.
    """

    config: SpecBranchConfig
    draft: PreTrainedModel | None  # a model, or a head of the target
    candidates: CandidateGenerator | None = None  # drafts in place of a model
    corpus: LookupCorpus | None = None  # where lookup drafts are found besides the text
    translation: Translation | None = None  # to the draft's tokenizer, if it is another one
    hooks: Sequence[SpeculationHook] = ()
    generator: torch.Generator | None = None
    observer: Callable[[Parts], Parts] | None = None  # wraps the parts of the loop to record what they do
    fills_cache: bool = False  # the caller's own past_key_values is to be kept up to date
    asked: bool = True  # a draft or settings were given; otherwise what cannot be served is left alone without a word
    # Capture all stages instead of generating, and report progress here.
    warm_up: Progress | None = field(default_factory=lambda: warming_up.get())

    def prepared(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        processors: Sequence[Processor],
        criteria: Sequence[Any],
        generation_config: GenerationConfig,
        streamer: Any,
        model_kwargs: dict[str, Any],
    ) -> Call:
        """Return the call as transformers has prepared it, without its draft; see `draft_of_call`."""
        return Call(
            model=model,
            draft=None,
            config=self.config,
            hooks=self.hooks,
            generator=self.generator,
            input_ids=input_ids,
            processors=processors,
            criteria=criteria,
            generation_config=generation_config,
            streamer=streamer,
            model_kwargs=model_kwargs,
            fills_cache=self.fills_cache,
            corpus=self.corpus,
            candidates=self.candidates,
            translation=self.translation,
            observer=self.observer,
            ranks=ranks_of(model),
        )

    def draft_of_call(self, target: PreTrainedModel, samples: bool, rows: int | None = None) -> PreTrainedModel | None:
        """Return the model that drafts: the draft, or a cheaper copy of it. On a CPU only if the settings say so.

        Args:
            target: the model that generates.
            samples: the text is sampled.
            rows: the batch size; None if it changes.
        """
        config, draft = self.config, self.draft
        has_copies = not isinstance(draft, TargetHead) and self.translation is None
        if draft is None or not has_copies or not POLICIES[config.policy].drafts:
            return draft
        off = (None,) if draft.device.type == "cuda" else (None, "auto")
        if all(setting in off for setting in config.draft_form):
            return draft
        from ..planning.draft_choice import draft_of_call

        return draft_of_call(config, target, draft, samples, user=self, rows=rows)


@dataclass
class Call:
    """One `generate()` call as transformers has prepared it."""

    model: PreTrainedModel
    draft: PreTrainedModel | None
    config: SpecBranchConfig
    hooks: Sequence[SpeculationHook]
    generator: torch.Generator | None
    input_ids: Tensor  # [B, P]
    processors: Sequence[Processor]
    criteria: Sequence[Any]
    generation_config: GenerationConfig
    streamer: Any
    model_kwargs: dict[str, Any]
    fills_cache: bool  # the caller's own past_key_values is to be kept up to date
    corpus: LookupCorpus | None = None  # where lookup drafts are found besides the text
    candidates: CandidateGenerator | None = None  # drafts in place of a model
    translation: Translation | None = None  # to the draft's tokenizer, if it is another one
    observer: Callable[[Parts], Parts] | None = None  # wraps the parts of the loop to record what they do
    pause: int | None = None  # the length of text at which this call ends and another continues
    ended: tuple[bool, ...] = ()  # rows that were complete before
    padding: int = 0  # rows at the end that fill the batch up to a captured size; see `row_padding`
    ranks: Any = None  # the processes of a tensor parallel model (`runtime.ranks.Ranks`), while all of them take part
    known_unpadded: bool | None = None  # see `is_unpadded`; None: not known yet

    @property
    def pad_token(self) -> int:
        """What fills rows that have ended; 0 if there is no such token."""
        pad = self.generation_config.pad_token_id
        if not isinstance(pad, int):  # transformers takes the first token that ends a text
            pad = getattr(self.generation_config, "_pad_token_tensor", None)
        return 0 if pad is None else int(pad)

    @property
    def rows(self) -> int:
        """Rows of every pass, padding rows included."""
        return self.input_ids.shape[0]

    @property
    def in_step(self) -> bool:
        """Whether rows must advance together, as in plain `generate()`."""
        ordered = any(map(is_opaque, self.processors))  # processors must be called token by token
        return ordered or (self.rows > 1 and self.stopper.needs_rows_in_step)

    @property
    def may_plan(self) -> bool:
        """Whether there may be anything for the planner to choose. Hooks and length heads were made for one method.

        How well a head of the target agrees with a text depends on the target's states, and recordings compare tokens
        of one vocabulary.
        """
        if self.draft is None or isinstance(self.draft, TargetHead) or self.translation is not None:
            return False
        return self.config.policy == "auto" and not self.in_step and not self.all_hooks

    @property
    def stopper(self) -> Stopper:
        longest = self.generation_config.max_length
        return Stopper(self.criteria, longest if self.pause is None else min(longest, self.pause))

    @property
    def filled(self) -> int:
        """Tokens that the target will have read, cached ones included."""
        mask: Tensor | None = self.model_kwargs.get("attention_mask")
        length = None if mask is not None else getattr(self.generation_config, "_mask_length", None)
        if length is not None:
            return int(length)
        embedded = self.model_kwargs.get("inputs_embeds")
        like = mask if mask is not None else self.input_ids if embedded is None else embedded
        return int(like.shape[1])

    @property
    def slots(self) -> int:
        """The longest a row may get in the target's cache."""
        return self.filled + self.stopper.max_length - self.input_ids.shape[1]

    @property
    def is_unpadded(self) -> bool:
        """Whether the attention mask hides nothing. The device is asked once, and only if there is a mask."""
        if self.known_unpadded is None:
            mask: Tensor | None = self.model_kwargs.get("attention_mask")
            self.known_unpadded = mask is None or bool(mask.all())
        return self.known_unpadded

    @property
    def past(self) -> Cache | None:
        return self.model_kwargs.get("past_key_values", self.model_kwargs.get("cache_params"))

    @property
    def fills(self) -> bool:
        """Whether the cache is returned, or was the caller's."""
        return self.past is not None and (bool(self.generation_config.return_dict_in_generate) or self.fills_cache)

    @property
    def records(self) -> bool:
        """Whether scores, logits, hidden states or attentions are returned."""
        config = self.generation_config
        wanted = config.output_scores, config.output_logits, config.output_hidden_states, config.output_attentions
        return bool(config.return_dict_in_generate) and any(wanted)

    @property
    def all_hooks(self) -> list[SpeculationHook]:
        """The user's hooks, then the length head; the built-in rules come after these."""
        head = self.config.length_head
        if isinstance(head, SpeculationHook):
            return [*self.hooks, head]
        return [*self.hooks, LengthHeadHook(head)] if callable(head) else list(self.hooks)

    @cached_property
    def stage_settings(self) -> tuple[Hashable, ...]:
        """The arguments of the call that captured stages depend on. All processors must have a static form.

        Some settings are on the device, which is asked once, before it reads the prompt.
        """
        return bool(self.generation_config.do_sample), *map(signature, self.processors)

    @property
    def temperature(self) -> float:
        """The temperature at which a sampled text is drawn."""
        warpers = [each for each in self.processors if isinstance(each, TemperatureLogitsWarper)]
        return float(warpers[-1].temperature) if warpers else 1.0

    @property
    def draws_drafts(self) -> bool:
        """Whether drafts are drawn from `q`, or are its likeliest tokens.

        A processor that must be called in order gives no `p` for positions ahead, so drafts cannot be tested against
        it; they can be compared with its choice.
        """
        if any(map(is_opaque, self.processors)):
            return False
        if self.config.draft_sampling != "auto":
            return self.config.draft_sampling == "sample"
        return self.temperature >= GREEDY_DRAFTS_BELOW

    def seeds(self) -> Iterator[int]:
        """Return seeds for the verifier and for each drafter, apart, so that threads cannot reorder the draws.

        They come from the caller's source of randomness: the same seed gives the same text.
        """
        if not self.generation_config.do_sample:
            return count()
        source = self.generator
        where = source.device if source is not None else torch.device("cpu")
        return count(int(torch.randint(2**62, (1,), generator=source, device=where)))

    def random_state(self) -> Tensor:
        """Return the state of the caller's source of randomness."""
        return torch.get_rng_state() if self.generator is None else self.generator.get_state()

    def restore_random_state(self, state: Tensor) -> None:
        """Put the caller's source of randomness back into an earlier state."""
        if self.generator is None:
            torch.set_rng_state(state)
        else:
            self.generator.set_state(state)

    def why_prompt_is_refused(self) -> str:
        """Return why the prompt is refused: it is empty, or longer than the context. Empty if it is not refused."""
        shape, length = tuple(self.input_ids.shape), self.input_ids.shape[1]
        if self.rows == 0 or (length == 0 and self.model_kwargs.get("inputs_embeds") is None):
            return f"the prompt is empty (input_ids of shape {shape}): give at least one token per row"
        limit = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        mask = self.model_kwargs.get("attention_mask")
        if limit is None or not 0 < limit < (length if mask is None else mask.shape[1]):
            return ""  # the device is not asked
        real = int(mask.sum(1).max()) if mask is not None else length
        if limit < real and not LengthDependentRotary(self.model):
            return (
                f"the prompt has {real} tokens and {type(self.model).__name__} a context of {limit}: shorten the prompt"
            )
        return ""

    def attention(self) -> Tensor:
        """[B, filled] bool over everything the target will have read, cached tokens included."""
        mask: Tensor | None = self.model_kwargs.get("attention_mask")
        if mask is not None:
            return mask.bool()
        return torch.ones((self.rows, self.filled), dtype=torch.bool, device=self.input_ids.device)

    def first_position(self, attention: Tensor, next_position: Tensor | None) -> Tensor:
        """[B] the position of slot 0, such that slot `s` after the prompt has position `s + first`.

        Args:
            attention: [B, filled], see `attention()`.
            next_position: [B, 1] or [axes, B, 1] of the first new token; None: the model counts slots.
        """
        if next_position is None:
            return torch.zeros(self.rows, dtype=torch.long, device=attention.device)
        if next_position.ndim == 3:  # those of the text; the others are kept relative to them
            return -(~attention).sum(1)
        return next_position[:, 0].expand(self.rows) - attention.shape[1]

    def is_tokens_alone(self, attention: Tensor, by_spans: bool) -> bool:
        """Whether all the target is to read are the tokens of the prompt, one after the other.

        Then it may read them in any way; otherwise only the model's own generation path knows how.

        Args:
            attention: [B, filled], see `attention()`.
            by_spans: spans say what tokens see. Then there may be padding on the left, and the beginning of the prompt
                may be in the cache.
        """
        given = {name for name, value in self.model_kwargs.items() if value is not None and value is not False}
        model, length = type(self.model), self.input_ids.shape[1]
        cached = 0 if self.past is None else past_length(self.past)
        if given - USUAL_INPUTS or attention.shape[1] != length or (cached and not (by_spans and cached < length)):
            return False
        if any(getattr(model, name) is not getattr(GenerationMixin, name) for name in OWN_WAYS):
            return False
        positions: Tensor | None = self.model_kwargs.get("position_ids")
        if positions is not None:
            count = positions.shape[-1]  # of the last tokens
            padding = (~attention).sum(1, keepdim=True).to(positions.dtype)
            usual = torch.arange(length - count, length, dtype=positions.dtype, device=positions.device) - padding
            if not bool(((positions == usual) | ~attention[:, length - count :]).all()):
                return False
        return by_spans or self.is_unpadded
