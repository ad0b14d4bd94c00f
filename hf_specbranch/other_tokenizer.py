"""What a draft with another tokenizer costs: how much the vocabularies share, and the measured speed of both methods.

Nothing is predicted here: recordings of agreement compare tokens of one vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from .config import SpecBranchConfig
from .planning.measure import Inputs, decode_seconds, plain_run_seconds
from .progress import Progress
from .vocabularies import Translation, translation_for

# By name, the policies to measure: a draft of text, and drafts of shared tokens.
METHODS = {
    "autoregressive": "autoregressive",
    "vanilla, re-encoded text": "vanilla",
    "pearl, shared tokens": "pearl",
    "specbranch, shared tokens": "specbranch",
}


@dataclass(frozen=True)
class TranslationCosts:
    """What was measured with a draft that has another tokenizer.

    Attributes:
        sharing: how much is shared: `tokens`, and their fractions `of_target`, `of_draft` and `of_text`, the tokens
            that the target generated; `draft_tokens_per_token` in these texts.
        plain: tokens per second of plain `generate()`.
        speeds: tokens per second of each method.
        per_pass: tokens per target pass of each method.
        settings: the settings of each method.
    """

    sharing: dict[str, float]
    plain: float
    speeds: dict[str, float]
    per_pass: dict[str, float]
    settings: dict[str, SpecBranchConfig]

    def in_words(self) -> str:
        """Return what is shared and what that costs, in words."""
        share, passes = self.sharing, self.per_pass
        text, shared = passes["vanilla, re-encoded text"], passes["specbranch, shared tokens"]
        return (
            f"{share['tokens']:.0f} tokens are shared: {share['of_target']:.0%} of the target's, "
            f"{share['of_draft']:.0%} of the draft's, and {share['of_text']:.0%} of the tokens in these texts. For one "
            f"of these the draft reads {share['draft_tokens_per_token']:.2f}. Drafts of shared tokens end at each "
            f"of the others: they gave {shared:.2f} tokens per target pass, re-encoded text {text:.2f}."
        )


def describe_sharing(translation: Translation) -> str:
    """Return how much two vocabularies share, in words."""
    share = translation.sharing
    return (
        f"they differ: {share.tokens} tokens are shared, {share.of_target:.0%} of the target's and "
        f"{share.of_draft:.0%} of the draft's; drafts are translated, and nothing is planned"
    )


def measure_translation(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: Any,
    draft_tokenizer: Any,
    prompts: Sequence[Inputs],
    max_new_tokens: int,
    max_draft_length: int,
    runtime: str,
    repeats: int,
    progress: Progress,
) -> TranslationCosts | None:
    """Measure each method on the same greedy texts; None if every text ends after one token.

    Args:
        model: the target, with SpecBranch attached.
        draft: a draft with another tokenizer.
        tokenizer: the target's.
        draft_tokenizer: the draft's.
        prompts: tokenized prompts.
        max_new_tokens: tokens to generate per prompt.
        max_draft_length: gamma.
        runtime: as in `SpecBranchConfig`.
        repeats: how often each is timed; the fastest run counts.
        progress: receives what is timed; advances after every generation.
    """
    translation = translation_for(model, draft, tokenizer, draft_tokenizer)
    assert translation is not None
    settings = {
        name: SpecBranchConfig(policy=policy, max_draft_length=max_draft_length, runtime=runtime)
        for name, policy in METHODS.items()
    }
    both = {"tokenizer": tokenizer, "assistant_tokenizer": draft_tokenizer}
    seconds, passes, plain = dict.fromkeys(settings, 0.0), dict.fromkeys(settings, 0.0), 0.0
    texts: list[list[int]] = []
    for number, inputs in enumerate(prompts, start=1):
        progress.doing(f"recording text {number} of {len(prompts)}")
        out = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, specbranch=False)
        new = out[0, inputs["input_ids"].shape[1] :].tolist()
        progress.advance()
        if len(new) < 2:
            continue
        texts.append(new)
        best, shortest = dict.fromkeys(settings, float("inf")), [float("inf")] * 2
        for turn in range(repeats + 1):  # the first is a warm-up
            for name, config in settings.items():
                progress.doing(f"timing {name} on text {number} of {len(prompts)}")
                taken = decode_seconds(model, draft, {**inputs, **both}, config, len(new))
                best[name] = min(best[name], taken) if turn else best[name]
                passes[name] += model.specbranch_stats.row_passes - 1 if not turn else 0  # without the prefill
                progress.advance()
            runs = [plain_run_seconds(model, inputs, count) for count in (len(new), 1)]
            shortest = [min(pair) for pair in zip(shortest, runs)] if turn else shortest
        plain += max(shortest[0] - shortest[1], 1e-9)
        for name, taken in best.items():
            seconds[name] += taken
    if not texts:
        return None
    tokens = sum(len(text) - 1 for text in texts)
    share, generated = translation.sharing, [token for text in texts for token in text]
    read = sum(len(translation.pieces(token)) for token in generated)
    sharing = {
        "tokens": share.tokens,
        "of_target": share.of_target,
        "of_draft": share.of_draft,
        "of_text": sum(token in translation.to_draft for token in generated) / len(generated),
        "draft_tokens_per_token": read / len(generated),
    }
    speeds = {name: tokens / taken for name, taken in seconds.items()}
    return TranslationCosts(
        sharing, tokens / plain, speeds, {name: tokens / max(1.0, count) for name, count in passes.items()}, settings
    )
