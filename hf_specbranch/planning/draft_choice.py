"""Which form of its draft a call takes: the draft itself, or a cheaper copy (`decoding/draft_copy.py`).

By sizes, a copy pays where reading the draft's weights takes most of a draft step: on a GPU, in captured stages, for a
draft that is not tiny and a batch of few rows. After some texts that a copy has drafted for, its steps are compared
with an estimate of the draft's own (a warm-up times both: `step_time`), the draft itself reads the same text, and the
speeds that both would reach are compared. A copy that does not pay is not used again for this pair. Sampled texts are
left to sizes alone: they may not depend on measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from ..config import SpecBranchConfig
from ..decoding.draft_copy import ROUTERS, DraftForm, copy_of, why_not_copied
from ..kernels.backend import HALF_PRECISION
from ..layers.packed_linear import Bits8, can_be_packed
from ..layers.shortlist import ROOM
from ..model_state import state_of, weight_bytes
from .agreement import Agreement
from .chooser import choose
from .knowledge import Knowledge, knowledge_of
from .online import Planner
from .sizes import predicted_costs, size_of

AUTO_WEIGHTS: Bits8 = "float8"
AUTO_SHORTLIST = 65536  # tokens; half as many are read 2% faster, and agree with the target 2% less often
SMALLEST_VOCABULARY = 3 * AUTO_SHORTLIST // 2  # tokens, from which on a shortlist leaves out enough of them
SMALLEST_DRAFT = 100_000_000  # parameters; a step of a smaller draft is bound by its launches
LARGEST_SHARE = 0.6  # of the draft's bytes, that a step of a copy may read
MOST_ROWS = 4  # of a batch: more are read by other kernels, and a step is less bound by the bytes of the weights
MIN_STEP_GAIN = 1.05  # how many times faster a step of a copy must be to be worth its memory
# Texts until both are compared, then each time their number has grown fourfold. The draft itself reads the text kernel
# by kernel, 0.1 s on a slow host, and a pair that is only tried out need not wait for that.
FIRST_COMPARISON, NEXT_COMPARISON = 32, 4


def draft_of_call(
    config: SpecBranchConfig,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    samples: bool,
    user: object,
    rows: int | None = None,
) -> PreTrainedModel:
    """Return the draft, or its copy in the form that the settings name or that pays.

    Args:
        config: the settings of the call.
        target: the model that generates.
        draft: its draft.
        samples: the text is sampled.
        user: an object that lives as long as the call.
        rows: the batch size. None: it changes, and only forms that the settings name are taken.
    """
    given = named_form(config)
    form = form_by_sizes(config, draft, given, rows)
    if form != given and not samples and is_slower(form, knowledge_of(target, draft)):
        form = given
    return draft if form == DraftForm() else copy_of(draft, form, user)


def named_form(config: SpecBranchConfig) -> DraftForm:
    """Return the form that the settings name; what they leave to the planner is as in the draft itself.

    Example:
        >>> named_form(SpecBranchConfig(draft_weights="int8"))
        DraftForm(weights='int8', shortlist=None)
    """
    return DraftForm(*(None if setting == "auto" else setting for setting in config.draft_form))  # type: ignore[arg-type]


def form_by_sizes(config: SpecBranchConfig, draft: PreTrainedModel, given: DraftForm, rows: int | None) -> DraftForm:
    """Return the form that the settings name, with what sizes say in place of "auto"."""
    is_captured = draft.device.type == "cuda" and config.runtime != "eager" and config.kernels is not False
    if not is_captured or draft.dtype not in HALF_PRECISION or rows is None or rows > MOST_ROWS:
        return given
    if weight_bytes(draft) < SMALLEST_DRAFT * draft.dtype.itemsize:
        return given
    form = given
    if config.draft_weights == "auto":
        form = form._replace(weights=AUTO_WEIGHTS)
    if config.draft_shortlist == "auto" and draft.get_input_embeddings().weight.shape[0] >= SMALLEST_VOCABULARY:
        form = form._replace(shortlist=AUTO_SHORTLIST)
    if form in state_of(draft).copies:  # it was found out below, before it was made
        return form
    if form == given or why_not_copied(draft, form):
        return given
    return form if share_read(draft, form) <= LARGEST_SHARE else given


def share_read(draft: PreTrainedModel, form: DraftForm) -> float:
    """Return the share of the draft's bytes that a step of a copy in this form reads.

    Example:
        >>> from hf_specbranch import load_demo_pair
        >>> draft = load_demo_pair()[1]
        >>> share_read(draft, DraftForm())
        1.0
    """
    whole, saved, output = size_of(draft).weights, 0.0, draft.get_output_embeddings()
    for name, module in draft.named_modules():
        if name.rpartition(".")[2] in ROUTERS or not (can_be_packed(module) or module is output):
            continue
        weight = module.weight
        rows, depth = weight.shape
        if module is output and isinstance(form.shortlist, int):
            rows = min(rows, form.shortlist + ROOM)
        element = 1 if form.weights is not None and can_be_packed(module) else weight.element_size()
        saved += weight.nbytes - rows * depth * element
    return 1 - saved / whole


def is_slower(form: DraftForm, known: Knowledge) -> bool:
    """Return whether a copy in this form was found not to pay."""
    return known.step_gains.get(form.name, MIN_STEP_GAIN) < MIN_STEP_GAIN or known.copy_gains.get(form.name, 1.0) < 1


def original_of(draft: PreTrainedModel | None) -> PreTrainedModel | None:
    """Return the model that this one is a copy of, if it is one."""
    original = None if draft is None else state_of(draft).original
    return None if original is None else original()


def estimated_gain(planner: Planner, target: PreTrainedModel, draft: PreTrainedModel) -> float | None:
    """Return how many times faster a step of a copy is than one of the draft itself.

    The steps of the copy were timed. Those of the draft itself are predicted, since to time them it would have to be
    captured. Launches and waits are in no prediction, and both have them: what the steps of the copy take besides the
    prediction is added, up to half of it. Beyond that, its kernels are slow.

    Args:
        planner: of a text with the copy.
        target: the model that generates.
        draft: the copy.
    """
    original = original_of(draft)
    if original is None:
        return None
    own, context = planner.costs(), planner.context()
    expected, sizes = planner.predicted(context), (size_of(target), size_of(original))
    slower = own.target_pass / expected.target_pass  # this machine than predicted
    step = slower * predicted_costs(*sizes, planner.captured, planner.situation.rows, context).draft_step
    of_copy = slower * expected.draft_step
    return (step + min(own.draft_step - of_copy, of_copy / 2)) / own.draft_step


def compare_steps(target: PreTrainedModel, draft: PreTrainedModel, time_steps: Callable[[], float | None]) -> bool:
    """Return whether a step of a copy is fast enough, compared with the draft itself; found once for each pair.

    Args:
        target: the model that generates.
        draft: the copy.
        time_steps: returns how many times faster a step of the copy is; None if that cannot be found.
    """
    original, name = original_of(draft), state_of(draft).form.name
    assert original is not None
    known = knowledge_of(target, original)
    if name not in known.step_gains and (gain := time_steps()) is not None:
        known.step_gains[name] = gain
        known.save()
    return known.step_gains.get(name, MIN_STEP_GAIN) >= MIN_STEP_GAIN


def compare_drafts(
    planner: Planner,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    read: Callable[[PreTrainedModel], list[Agreement]],
    time_steps: Callable[[], float | None],
) -> None:
    """Record how much faster a copy is than the draft itself, on a text that it has drafted for.

    Args:
        planner: of the text.
        target: the model that has generated it.
        draft: the copy.
        read: records how a draft agrees with the text.
        time_steps: as in `compare_steps`.
    """
    original, name = original_of(draft), state_of(draft).form.name
    if original is None or not planner.measures or not planner.captured or not is_due(planner.known.generations):
        return
    known = knowledge_of(target, original)
    if (
        compare_steps(target, draft, time_steps)
        and name in known.step_gains
        and all(both := (read(draft), read(original)))
    ):
        step_gain = known.step_gains[name]
        if name not in known.copy_gains:  # one text says little: at first as if both agreed with it equally often
            known.copy_gains[name] = copy_gain(planner, (both[1], both[1]), step_gain)
        known.copy_gains[name] = (known.copy_gains[name] + copy_gain(planner, both, step_gain)) / 2
        known.save()
    if is_slower(state_of(draft).form, known):
        state_of(original).copies.pop(state_of(draft).form, None)  # a sampled text makes it again


def is_due(texts: int) -> bool:
    """Return whether to compare after so many texts.

    Example:
        >>> [texts for texts in range(1000) if is_due(texts)]
        [32, 128, 512]
    """
    due = FIRST_COMPARISON
    while due < texts:
        due *= NEXT_COMPARISON
    return due == texts


def copy_gain(planner: Planner, texts: tuple[Sequence[Agreement], Sequence[Agreement]], step_gain: float) -> float:
    """Return the speed with the copy over that with the draft itself, both with the plan that is best for the latter.

    Args:
        planner: of a text with the copy.
        texts: how the copy and the draft itself agree with the same texts.
        step_gain: how many times faster a step of the copy is.
    """
    own = planner.costs()
    original = replace(own, draft_step=step_gain * own.draft_step, draft_branch=step_gain * own.draft_branch)
    best = choose(planner.plans, texts[1], original, planner.captured)
    return choose([best.plan], texts[0], own, planner.captured).tokens_per_second / best.tokens_per_second
