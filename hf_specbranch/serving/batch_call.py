"""Makes the call that a running batch is: the settings of `generate()`, and rows that each request takes for itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from ..attachment import Attachment
from ..config import SpecBranchConfig
from ..decoding.call import Call, Request
from ..decoding.hooks import SpeculationHook
from ..decoding.model_inputs import reread_of
from ..decoding.policies import POLICIES
from ..decoding.scoring import ExactScorer, Prefixes
from ..decoding.text import Stopper
from ..heads.model import resolve_head
from ..mixin import SpecBranchMixin
from ..model_state import ranks_of, transformers_model
from ..request import DEFAULTS, MergedSettings, call_config, check_request, settings_for_sources, why_plain
from ..runtime.eager import layer_kinds
from ..runtime.positions import LengthDependentRotary
from ..runtime.recurrent_cache import is_recurrent
from ..target_heads.base import TargetHead
from ..vocabularies import translation_for
from .completion import Completion
from .row_sampling import GREEDY_ROWS, RowSampling, Sampling

# Settings in a model's generation config that change scores, and that a running batch has no per-row form of.
UNSUPPORTED = (
    "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
    "exponential_decay_length_penalty", "min_length", "min_new_tokens", "guidance_scale", "watermarking_config",
)  # fmt: skip


class RowStopper(Stopper):
    """Lets the answer in each row decide where it ends.

    Args:
        rows: rows of the batch.
        max_length: the longest text, prompt included.
    """

    def __init__(self, rows: int, max_length: int) -> None:
        super().__init__((), max_length)
        self.completions: list[Completion | None] = [None] * rows

    def row_ends(self, ids: Tensor, length: int, token: int, scores: Any, row: int = 0) -> bool:
        completion = self.completions[row]
        return completion is None or completion.add(token, is_last=length >= self.max_length)


@dataclass
class BatchCall(Call):
    """A call without a prompt: its rows take one text after another."""

    row_stopper: RowStopper | None = None

    @property
    def stopper(self) -> Stopper:
        assert self.row_stopper is not None
        return self.row_stopper


@dataclass(frozen=True)
class BatchSettings:
    """What all batches of an engine share.

    Args:
        model: the target, with SpecBranch attached.
        draft: what drafts for it, if anything does.
        config: settings of SpecBranch.
        hooks: the length head as a hook, if it is one.
        max_length: the longest text, prompt included.
        ends: end-of-sequence tokens of the target.
        repetition_penalty: of the target's generation config.
    """

    model: PreTrainedModel
    draft: PreTrainedModel | None
    config: SpecBranchConfig
    hooks: tuple[SpeculationHook, ...]
    max_length: int
    ends: frozenset[int]
    repetition_penalty: float

    def call(self, rows: int, sampling: RowSampling) -> BatchCall:
        """Return the call of a batch with so many rows, all of them free."""
        model, ids = self.model, torch.zeros((rows, 1), dtype=torch.long, device=self.model.device)
        return BatchCall(
            model=model,
            draft=self.draft,
            config=self.config,
            hooks=self.hooks,
            generator=None,
            input_ids=ids,
            processors=self.processors(sampling),
            criteria=(),
            generation_config=GenerationConfig(max_length=self.max_length, do_sample=False),
            streamer=None,
            model_kwargs={"attention_mask": torch.ones_like(ids), "use_cache": True},
            fills_cache=False,
            corpus=cast(SpecBranchMixin, model)._specbranch_memory.corpus,
            ended=(True,) * rows,
            row_stopper=RowStopper(rows, self.max_length),
        )

    def processors(self, sampling: RowSampling) -> list[Any]:
        """Return what changes the scores of rows with these settings."""
        penalty, found = self.repetition_penalty, list[Any]()
        if penalty != 1.0:
            found.append(RepetitionPenaltyLogitsProcessor(penalty))
        return found if sampling.kind == GREEDY_ROWS else [*found, sampling]

    def first_token(self, prompt: list[int], sampling: Sampling, logits: Tensor) -> int:
        """Return the token that follows a prompt, by the logits [1, 1, V] after it."""
        row = RowSampling(1, sampling.kind)
        row.set_row(0, sampling)

        def prefixes() -> Prefixes:
            ids = torch.tensor([[prompt]], device=logits.device)
            return Prefixes(ids, torch.tensor([[len(prompt)]], device=logits.device))

        scores = ExactScorer(self.processors(row), logits.device)(logits.float(), prefixes)
        return int(scores.argmax(-1))  # the host waits for the prompt to be read


def batch_settings(
    model: Any, tokenizer: Any = None, max_length: int | None = None, settings: Any = None
) -> BatchSettings:
    """Check a model and its settings as `generate()` does, and return what running batches need.

    Args:
        model: the target, as `specbranch(model, draft=...)` returned it.
        tokenizer: of the target; a length head is checked against it.
        max_length: the longest text, prompt included; by default the target's context.
        settings: of SpecBranch, as `generate(specbranch=...)` takes them.

    Raises:
        ValueError: a running batch cannot serve this model, or the settings are wrong.
    """
    found = transformers_model(model)
    if not isinstance(found, SpecBranchMixin):
        raise ValueError(f"{type(found).__name__} has no SpecBranch: attach it with specbranch(model, draft=...)")
    attachment, target = found._specbranch_memory, cast(PreTrainedModel, found)
    own, draft = MergedSettings({"do_sample": False}, target.generation_config), attachment.draft
    config = call_config(settings, own, draft, attachment)
    if config.prompt_lookup_num_tokens == "auto" and target.device.type == "cuda":
        config = replace(config, prompt_lookup_num_tokens=0)  # not timed yet with rows that come and go
    config = settings_for_sources(config, draft, candidates=None)
    check_request(target, draft, config, tokenizer, None)
    tokenizers = attachment.tokenizers
    if draft is not None and None not in tokenizers and translation_for(target, draft, *tokenizers) is not None:
        raise ValueError(f"the draft {type(draft).__name__} has another tokenizer, which a running batch cannot serve")
    if reason := why_plain(target, draft, own) or _why_not(target, attachment, own):
        raise ValueError(f"{type(target).__name__} cannot run in a running batch: {reason}")
    head, hooks = config.length_head or attachment.head, tuple[SpeculationHook, ...]()
    if head is not None and draft is not None and POLICIES[config.policy].forks:
        head = resolve_head(head, target, draft, tokenizer)
        if isinstance(head, SpeculationHook):
            hooks, head = (head,), None
    # Tree leaves save few passes in a batch, and log-probabilities need rounds that end at the target's own token.
    config = replace(config, length_head=head, tree_leaves=0)
    request = Request(config, draft, hooks=hooks)
    context = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = max_length or context or DEFAULT_LENGTH
    if context is not None and longest > context:
        raise ValueError(f"max_length={longest}: the context of {type(target).__name__} has {context} tokens")
    return BatchSettings(
        model=target,
        draft=request.draft_of_call(target, samples=False),
        config=config,
        hooks=hooks,
        max_length=longest,
        ends=end_tokens(target.generation_config, tokenizer),
        repetition_penalty=float(own.repetition_penalty or 1.0),
    )


DEFAULT_LENGTH = 4096  # of a model that does not say how long its context is


def end_tokens(config: GenerationConfig, tokenizer: Any) -> frozenset[int]:
    """Return the end-of-sequence tokens of a model."""
    given = config.eos_token_id if config.eos_token_id is not None else getattr(tokenizer, "eos_token_id", None)
    return frozenset([] if given is None else [given] if isinstance(given, int) else map(int, given))


def _why_not(model: PreTrainedModel, attachment: Attachment, settings: MergedSettings) -> str:
    """Return why a running batch cannot serve this model with these drafts and settings; empty if it can."""
    changed = [name for name in UNSUPPORTED if getattr(settings, name, None) not in (None, DEFAULTS.get(name), 0)]
    if changed:
        return f"its generation config sets {', '.join(changed)}"
    if reread_of(model) is not None:
        return "it reads its whole text again at some length"
    if ranks_of(model) is not None:
        return "it is tensor parallel, and only generate() tells the other ranks what to run"
    if attachment.candidates is not None:
        return "a CandidateGenerator drafts, which follows one text from its beginning"
    draft = attachment.draft
    if isinstance(draft, TargetHead):
        return f"{type(draft).__name__} drafts from the hidden states of the target, which are not kept row by row"
    reason = _why_not_in_rows(model)
    return reason if reason or draft is None else _why_not_in_rows(draft, "its draft")


def _why_not_in_rows(model: PreTrainedModel, name: str = "it") -> str:
    """Return why rows of this model cannot take other texts; empty if they can."""
    if any(map(is_recurrent, layer_kinds(model.config.get_text_config(decoder=True)))):
        return f"{name} has recurrent layers"
    return f"the rotary embedding of {name} depends on the length of the text" if LengthDependentRotary(model) else ""
