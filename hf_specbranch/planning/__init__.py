"""The planner: which settings promise the most tokens per second for this text, on this machine, with this pair.

A *plan* is a `SpecBranchConfig` in which every number is set: a policy, a draft length, a confidence threshold, a
number of rejection branches and of tree leaves, and whether the draft model runs while the target does. A generation
with `policy="auto"` is a sequence of *plan segments*: a number of rounds that follow one plan. Between two segments the
plan may change; the text does not depend on it.

The *planner knows* three things about a pair of models. They are kept in `Knowledge` from one generation to the next,
and on disk from one process to the next:

- **costs per situation**: `StepCosts` are predicted from the sizes of the models for any batch size and length of
  context, and corrected by what the rounds of each situation took (`CostFactors`).
- **recordings of agreement**: for each of the last texts, how confident the draft was at each position and which rank
  the target's token had among the draft's candidates (`Agreement`).
- **the last choice** per situation, and how fast each plan was compared with its prediction.

A recording and costs are enough to predict the speed of any plan: `replay` goes through the recorded text round by
round as the decoding loop would, and `predict` adds up the costs of these rounds. `choose` takes the fastest plan.

The modules, each importing only those above it:

    agreement   how a draft agrees with a text: recordings
    replay      the rounds that a plan would take on a recorded text (pure)
    costs       step costs, and the timing of a segment
    simulate    predicted speed of a plan: recordings and costs put together
    chooser     which plans there are, and which one is fastest
    sizes       step costs predicted from the sizes of the models
    calibrate   predicted costs corrected by timed segments
    store       the file in which all this is kept
    knowledge   what is known of a pair
    online      the planner during a generation
    timer       times its segments
    measure     step costs of a pair, measured with short generations
    tune        fixed settings for a pair: by replay first, then by measurement

Example:
    >>> from hf_specbranch import SpecBranchConfig
    >>> from hf_specbranch.planning import Agreement, StepCosts, choose, plans_within
    >>> recording = Agreement(confidence=(0.3,) * 33, rank=(-1,) * 33, candidates=5, chances=((0.3,) * 5,) * 33)
    >>> plans = plans_within(SpecBranchConfig(), captured=True)
    >>> choose(plans, [recording], StepCosts(target_pass=0.004, draft_step=0.0001), captured=True).plan.policy
    'autoregressive'
"""

from .agreement import Agreement, load_agreements, read_agreement, record_agreement, save_agreements
from .chooser import Choice, choose, plans_within
from .costs import StepCosts
from .replay import Round
from .simulate import Prediction, predict

__all__ = [
    "Agreement",
    "Choice",
    "Prediction",
    "Round",
    "StepCosts",
    "choose",
    "load_agreements",
    "plans_within",
    "predict",
    "read_agreement",
    "record_agreement",
    "save_agreements",
]
