"""Say whether a pair is worth it on this machine: checks, measurements, a prediction per policy, a recommendation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import PreTrainedModel

from .attach import specbranch
from .checks import FAILED, Check, versions
from .config import SpecBranchConfig
from .decoding.assembly import is_cheap
from .other_tokenizer import TranslationCosts, measure_translation
from .pair_checks import check_everything
from .planning.chooser import choose, describe, plans_within
from .planning.measure import Inputs, Measurement, generations, measure_costs
from .planning.simulate import Agreement, predict
from .planning.tune import Ranked, rank, record_all
from .progress import Progress
from .vocabularies import translation_for

NOTICEABLE = 1.05  # a gain below this is not worth a second model in memory


@dataclass(frozen=True)
class Row:
    """The speed of one policy, in tokens per second after the first token."""

    name: str
    settings: dict[str, Any]
    predicted: float | None  # None if nothing can be predicted
    ratio: float  # of the predicted speed, or of the measured one, to plain generate()
    measured: float | None = None


@dataclass(frozen=True)
class Report:
    """What the doctor found.

    Args:
        checks: the results of all checks. If one failed, nothing was measured.
        verdict: the answer in one sentence.
        agreement: how often the draft predicts the target's token.
        costs: milliseconds per step, and the hidden fraction of overlapped drafting.
        plain: tokens per second of plain `generate()`.
        policies: a prediction for each policy at its default settings and at its best, and for `policy="auto"`.
        explained: what sharing costs, in words.
        planned: the plan that `policy="auto"` would choose at these costs, in words.
        recommended: the settings to use; None if plain decoding is faster or a check failed.
        prediction_error: the median relative error of the predictions.
        sharing: how much two vocabularies share, if the draft has another tokenizer; see `TranslationCosts`.
        recording: a recording of agreement per text, as `planning.predict` takes it. Not part of `to_dict`.
    """

    checks: list[Check]
    verdict: str
    agreement: dict[str, float] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)
    plain: float = 0.0
    policies: list[Row] = field(default_factory=list)
    planned: str = ""
    recommended: dict[str, Any] | None = None
    prediction_error: float = 0.0
    sharing: dict[str, float] = field(default_factory=dict)
    explained: str = ""
    recording: list[Agreement] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        """Whether no check failed."""
        return all(check.state != FAILED for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields but `recording`, ready for JSON."""
        fields = {**asdict(self), "usable": self.usable}
        del fields["recording"]
        return fields


def examine(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: Any,
    draft_tokenizer: Any,
    prompts: Sequence[str],
    max_new_tokens: int = 48,
    max_draft_length: int = 8,
    max_branches: int = 4,
    repeats: int = 2,
    runtime: str = "auto",
    progress: Progress | None = None,
) -> Report:
    """Check a pair, measure it on a few prompts, and predict the speed of each policy.

    Args:
        target: the target model.
        draft: the draft model.
        tokenizer: the target's tokenizer.
        draft_tokenizer: the draft's tokenizer, which may be another one; None if there is none.
        prompts: texts like those the pair is meant for.
        max_new_tokens: tokens to generate per prompt.
        max_draft_length: gamma of the settings that are measured.
        max_branches: k_max of the settings that are measured.
        repeats: how often each is timed; the fastest run counts.
        runtime: as in `SpecBranchConfig`.
        progress: receives what is measured; advances after every generation, `examination_generations` times.

    Example:
        >>> from hf_specbranch import load_demo_pair
        >>> from hf_specbranch.doctor import examine
        >>> target, draft, tokenizer = load_demo_pair()
        >>> report = examine(target, draft, tokenizer, None, ["def add(a, b):"], max_new_tokens=12)
        >>> report.usable
        True
    """
    checks = [versions(), *check_everything(target, draft, tokenizer, draft_tokenizer)]
    return measure_pair(
        checks, target, draft, tokenizer, prompts, max_new_tokens, max_draft_length, max_branches, repeats, runtime,
        progress, draft_tokenizer,
    )  # fmt: skip


def measure_pair(
    checks: list[Check],
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[str],
    max_new_tokens: int = 48,
    max_draft_length: int = 8,
    max_branches: int = 4,
    repeats: int = 2,
    runtime: str = "auto",
    progress: Progress | None = None,
    draft_tokenizer: Any = None,
) -> Report:
    """Continue an examination after its checks, as `check_everything` yields them; the arguments are `examine`'s."""
    if failed := [check for check in checks if check.state == FAILED]:
        return Report(checks, f"This pair cannot be used: {failed[0].found}")
    progress = progress or Progress()
    model = specbranch(target)
    inputs: list[Inputs] = [dict(tokenizer(text, return_tensors="pt").to(target.device)) for text in prompts]
    if draft_tokenizer is not None and translation_for(target, draft, tokenizer, draft_tokenizer) is not None:
        found = measure_translation(
            model, draft, tokenizer, draft_tokenizer, inputs, max_new_tokens, max_draft_length, runtime, repeats,
            progress,
        )  # fmt: skip
        return _nothing_measured(checks) if found is None else _conclude_translated(checks, found)
    inputs, agreements = record_all(model, draft, inputs, max_new_tokens, progress)
    if not agreements:
        return _nothing_measured(checks)
    measurement = measure_costs(
        model, draft, inputs, agreements, max_draft_length, max_branches, runtime, repeats, progress
    )
    return _conclude(checks, agreements, measurement, runtime, is_cheap(target, draft))


def examination_generations(prompts: int, repeats: int = 2) -> int:
    """Return how often `examine` advances its progress."""
    return prompts + generations(prompts, repeats)


# ---- conclusions


def _nothing_measured(checks: list[Check]) -> Report:
    checks.append(Check("text", FAILED, "the target ends every text after one token: give other prompts"))
    return Report(checks, "Nothing could be measured: " + checks[-1].found)


def _conclude_translated(checks: list[Check], found: TranslationCosts) -> Report:
    rows = [
        Row(name, found.settings[name].to_dict(), None, speed / found.plain, speed)
        for name, speed in found.speeds.items()
    ]
    drafts = {name: speed for name, speed in found.speeds.items() if name != "autoregressive"}
    best, alone = max(drafts, key=drafts.__getitem__), max(found.plain, found.speeds["autoregressive"])
    verdict, worthwhile = _verdict(best, drafts[best], alone, "reached")
    recommended = found.settings[best].to_dict() if worthwhile else None
    return Report(
        checks, verdict, plain=found.plain, policies=rows, recommended=recommended, sharing=found.sharing,
        explained=found.in_words(),
    )  # fmt: skip


def _conclude(
    checks: list[Check], agreements: list[Agreement], measurement: Measurement, runtime: str, cheap: bool
) -> Report:
    costs, plain = measurement.costs, measurement.plain
    ranked = rank(agreements, costs, runtime=runtime, captured=measurement.captured, cheap=cheap)
    rows = [_row(name, measurement, plain) for name in ("autoregressive", "vanilla", "pearl", "specbranch")]
    for policy in ("vanilla", "pearl", "specbranch"):
        fastest = next(each for each in ranked if each.config.policy == policy)
        rows.append(Row(f"{policy}, best", fastest.config.to_dict(), *_speeds(fastest, plain)))
    auto = SpecBranchConfig(runtime=runtime)
    choice = choose(plans_within(auto, measurement.captured, costs.draft_step), agreements, costs, measurement.captured)
    rows.append(Row("auto", auto.to_dict(), choice.tokens_per_second, choice.tokens_per_second / plain))
    alone = predict(agreements, SpecBranchConfig(policy="autoregressive"), costs).tokens_per_second
    best = ranked[0]
    speed = best.prediction.tokens_per_second
    verdict, worthwhile = _verdict(best.config.policy, speed, max(alone, plain), "is predicted to reach")
    return Report(
        checks=checks,
        verdict=verdict,
        agreement=_agreement(agreements),
        costs=costs.to_dict(),
        plain=plain,
        policies=rows,
        planned=describe(choice.plan, choice.plan.overlap),
        recommended=best.config.to_dict() if worthwhile else None,
        prediction_error=measurement.error,
        recording=agreements,
    )


def _row(name: str, measurement: Measurement, plain: float) -> Row:
    predicted = measurement.predicted[name]
    settings = measurement.settings[name].to_dict()
    return Row(name, settings, predicted, predicted / plain, measurement.measured[name])


def _speeds(ranked: Ranked, plain: float) -> tuple[float, float]:
    speed = ranked.prediction.tokens_per_second
    return speed, speed / plain


def _verdict(best: str, speed: float, alone: float, reaches: str) -> tuple[str, bool]:
    """Return the answer, and whether to speculate.

    Args:
        best: names the fastest settings.
        speed: their tokens per second.
        alone: those of decoding without a draft.
        reaches: whether this was predicted or measured, in words.
    """
    ratio = speed / alone
    over = f"{ratio:.2f}x the speed of decoding without a draft ({alone:.0f} tokens per second)"
    if ratio >= NOTICEABLE:
        return f"Worth it: {best} {reaches} {speed:.0f} tokens per second, {over}.", True
    if ratio >= 1:
        return f"Hardly worth it: {best} {reaches} {over}.", True
    return (
        f"Not worth it here: speculation would be slower, {over} at its best. Use plain generate(), a faster draft, or "
        f"a draft that agrees more often.",
        False,
    )


def _agreement(agreements: Sequence[Agreement]) -> dict[str, float]:
    confidences = [value for agreement in agreements for value in agreement.confidence]
    ranks = [value for agreement in agreements for value in agreement.rank]
    right = [confidence for confidence, rank in zip(confidences, ranks) if rank == 0]
    wrong = [confidence for confidence, rank in zip(confidences, ranks) if rank != 0]
    return {
        "tokens": len(ranks),
        "first": len(right) / len(ranks),
        "in_four": sum(0 <= rank < 4 for rank in ranks) / len(ranks),
        "confidence_when_right": sum(right) / len(right) if right else 0.0,
        "confidence_when_wrong": sum(wrong) / len(wrong) if wrong else 0.0,
    }
