"""Which form of its draft a call takes: the draft itself, or a cheaper copy (`decoding/draft_copy.py`).

By sizes, a copy pays where reading the draft's weights takes most of a draft step: on a GPU, in captured stages, for a
draft that is not tiny. After texts that a copy has drafted for, the draft itself reads the same text, and the speeds
that both would reach are compared. A copy that is slower, because fewer of its tokens are accepted, is not used again
for a while. Sampled texts are left to sizes alone: they may not depend on what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedModel

from ..config import SpecBranchConfig
from ..decoding.draft_copy import DraftForm, copy_of, why_not_copied
from ..kernels.backend import HALF_PRECISION
from ..layers.packed_linear import Bits8
from ..model_state import state_of, weight_bytes
from .agreement import Agreement
from .chooser import choose
from .costs import StepCosts
from .knowledge import Knowledge, knowledge_of
from .online import Planner

AUTO_WEIGHTS: Bits8 = "int8"  # FP8 takes as many bytes; its distributions are further from the draft's
# Of Qwen2.5's tokenizer the lowest 65,536 ids are 97 to 98% of texts, the lowest 32,768 are 92 to 96%. In eight bits
# the second half of these rows is 7% of what a step of the 0.5B model reads.
AUTO_SHORTLIST = 65536
SMALLEST_DRAFT = 1 << 28  # bytes; a step of a smaller draft is bound by its launches
SMALLEST_VOCABULARY = 2 * AUTO_SHORTLIST - 8192  # tokens, from which on a shortlist leaves out enough of them
RETRY_EVERY = 32  # generations after which a copy that was slower is tried again


def draft_of_call(
    config: SpecBranchConfig, target: PreTrainedModel, draft: PreTrainedModel, samples: bool, user: object
) -> PreTrainedModel:
    """Return the draft, or its copy in the form that the settings name or that pays.

    Args:
        config: the settings of the call.
        target: the model that generates.
        draft: its draft.
        samples: the text is sampled.
        user: an object that lives as long as the call.
    """
    given = DraftForm(_given(config.draft_weights), _given(config.draft_shortlist))  # type: ignore[arg-type]
    form = form_by_sizes(config, draft, given)
    if form != given and not samples and is_slower(form, knowledge_of(target, draft)):
        form = given
    return draft if form == DraftForm() else copy_of(draft, form, user)


def is_slower(form: DraftForm, known: Knowledge) -> bool:
    """Return whether a copy in this form was slower than the draft itself; false when it is to be tried again."""
    retries = known.generations % RETRY_EVERY == RETRY_EVERY - 1
    return known.copy_gains.get(form.name, 1.0) < 1 and not retries


def form_by_sizes(config: SpecBranchConfig, draft: PreTrainedModel, given: DraftForm) -> DraftForm:
    """Return the form that the settings name, with what sizes say in place of "auto"."""
    is_captured = draft.device.type == "cuda" and config.runtime != "eager" and config.kernels is not False
    if not is_captured or draft.dtype not in HALF_PRECISION or weight_bytes(draft) < SMALLEST_DRAFT:
        return given
    form = given
    if config.draft_weights == "auto":
        form = form._replace(weights=AUTO_WEIGHTS)
    if config.draft_shortlist == "auto" and draft.get_input_embeddings().weight.shape[0] >= SMALLEST_VOCABULARY:
        form = form._replace(shortlist=AUTO_SHORTLIST)
    return given if form == given or why_not_copied(draft, form) else form


def _given(setting: int | str | None) -> int | str | None:
    return None if setting in ("auto", 0) else setting


def compare_drafts(
    planner: Planner,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    read: Callable[[PreTrainedModel], list[Agreement]],
    predicted: Callable[[PreTrainedModel], StepCosts],
) -> None:
    """Record how much faster a copy is than the draft itself, on a text that it has drafted for.

    Args:
        planner: of the text.
        target: the model that has generated it.
        draft: the copy.
        read: records how a draft agrees with the text.
        predicted: the costs that sizes predict with a draft.
    """
    state, texts = state_of(draft), planner.known.generations
    original = None if state.original is None else state.original()
    if original is None or not planner.measures or texts & (texts - 1):  # after 1, 2, 4, 8 ... texts
        return
    both = read(draft), read(original)
    if not all(both):
        return
    known = knowledge_of(target, original)
    gain = copy_gain(planner, known, both, predicted(original))
    before = known.copy_gains.get(state.form.name, gain)
    known.copy_gains[state.form.name] = (before + gain) / 2
    known.generations += gain < 1
    known.save()


def copy_gain(
    planner: Planner, known: Knowledge, texts: tuple[Sequence[Agreement], Sequence[Agreement]], predicted: StepCosts
) -> float:
    """Return the speed with the copy over that with the draft itself, each with its best plan.

    Args:
        planner: of a text with the copy.
        known: about the pair with the draft itself.
        texts: how the copy and the draft itself agree with the same texts.
        predicted: the costs that sizes predict with the draft itself.
    """
    measured = known.factors_in(planner.situation)
    factors = measured if measured.draft else planner.factors  # the copy was off by as much
    speeds = [
        choose(planner.plans, recorded, costs, planner.captured).tokens_per_second
        for recorded, costs in zip(texts, (planner.costs(), factors.costs(predicted)))
    ]
    return speeds[0] / speeds[1]
