"""What is compared: ways to generate the same tokens, transformers' own and ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from ..config import REJECTION_BRANCHES, TREE_LEAVES, SpecBranchConfig
from ..heads import LengthHead

# Every way by name, in the order they are run and shown.
TITLES = {
    "plain": "generate()",
    "static": 'generate(cache_implementation="static"), which transformers compiles on CUDA',
    "assisted": "transformers' assisted decoding, drafts of constant length, no confidence stop",
    "assisted-default": "transformers' assisted decoding with its own defaults",
    "lookup": "transformers' prompt lookup",
    "autoregressive": "ours, no draft",
    "vanilla-best": "ours, draft then verify, the best fixed length of the sweep",
    "vanilla-stop": "ours, draft then verify, with the confidence stop",
    "vanilla-tree": "ours, draft then verify, with runners-up in the target's pass",
    "pearl-best": "ours, drafting ahead on one line, the best fixed length of the sweep",
    "auto": "ours, by default: the planner chooses",
    "specbranch": "ours, the method of the paper: branches at the branch point, overlap",
    "specbranch-outcomes": "ours, with branches for corrections",
    "specbranch-tree": "ours, with branches for corrections and runners-up in the target's pass",
    "specbranch-one-branch": "ours, a single branch",
    "specbranch-no-overlap": "ours, target and draft in turns",
    "specbranch-head": "ours, with a length head",
    "specbranch-best": "ours, the best settings of the sweep",
}
EAGER = ("plain", "assisted", "assisted-default", "lookup")  # nothing is captured or compiled
SWEPT = ("vanilla-best", "pearl-best", "specbranch-best")  # settings known only after a sweep


class Pair(NamedTuple):
    """The models every way runs on."""

    target: PreTrainedModel  # with SpecBranch attached
    draft: PreTrainedModel
    tokenizer: Any
    head: LengthHead | None = None


class Choices(NamedTuple):
    """What the user set for our ways; None leaves the default of `SpecBranchConfig`."""

    gamma: int | None = None
    epsilon: float | None = None
    branches: int | None = None
    runtime: str = "auto"
    kernels: bool | str = "auto"

    def expected_runtime(self, device: str) -> str:
        """What our ways should run with on this type of device."""
        return self.runtime if self.runtime != "auto" else "graph" if device == "cuda" else "eager"

    def settings(self, policy: str, **more: Any) -> SpecBranchConfig:
        """Our settings for a policy; `more` wins over what the user set."""
        given = dict(max_draft_length=self.gamma, confidence_threshold=self.epsilon, max_branches=self.branches)
        chosen = {name: value for name, value in given.items() if value is not None}
        return SpecBranchConfig(policy=policy, runtime=self.runtime, kernels=self.kernels, **{**chosen, **more})


@dataclass(frozen=True)
class Way:
    """One way to generate.

    Args:
        name: a key of `TITLES`.
        settings: ours; None for transformers' own ways.
        arguments: further arguments of `generate()`.
        drafts: `generate()` is given the draft.
        draft_settings: put into the draft's generation config meanwhile; transformers reads them from there.
        head: a length head to use.

    Example:
        >>> Way("plain").is_ours
        False
    """

    name: str
    settings: SpecBranchConfig | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    drafts: bool = False
    draft_settings: dict[str, Any] = field(default_factory=dict)
    head: LengthHead | None = None

    @property
    def is_ours(self) -> bool:
        return self.settings is not None

    @contextmanager
    def prepared(self, pair: Pair) -> Iterator[dict[str, Any]]:
        """The arguments of `generate()`; the draft's generation config is put back afterwards."""
        arguments: dict[str, Any] = dict(self.arguments)
        arguments["specbranch"] = self.settings if self.settings is not None else False
        if self.drafts:
            arguments["assistant_model"] = pair.draft
        if self.head is not None:
            arguments["length_head"] = self.head
        config = pair.draft.generation_config
        before = {name: getattr(config, name, None) for name in self.draft_settings}
        config.update(**self.draft_settings)
        try:
            yield arguments
        finally:
            for name, value in before.items():
                setattr(config, name, value)

    def to_dict(self) -> dict[str, Any]:
        """Name, title and settings, ready for JSON."""
        settings = None if self.settings is None else replace(self.settings, length_head=None).to_dict()
        arguments = {**self.arguments, **self.draft_settings}
        return {"title": TITLES[self.name], "settings": settings, "arguments": arguments, "head": self.head is not None}


def check_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names in the order of `TITLES`, in which they run; outputs are compared with those of the first."""
    if unknown := sorted(set(names) - set(TITLES)):
        raise ValueError(f"unknown ways {', '.join(unknown)}: expected some of {', '.join(TITLES)}")
    if not names:
        raise ValueError(f"no ways are named: expected some of {', '.join(TITLES)}")
    return tuple(name for name in TITLES if name in names)


def fixed_ways(names: tuple[str, ...], choices: Choices, head: LengthHead | None) -> dict[str, Way]:
    """The chosen ways whose settings need no sweep."""
    length = choices.settings("vanilla").draft_length
    # Without a threshold and with a constant schedule, transformers drafts what it is told to.
    constant = dict(
        num_assistant_tokens=length, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    tree = dict(max_rejection_branches=REJECTION_BRANCHES, tree_leaves=TREE_LEAVES)
    ways = [
        Way("plain"),
        Way("static", arguments={"cache_implementation": "static"}),
        Way("assisted", drafts=True, draft_settings=constant),
        Way("assisted-default", drafts=True),
        Way("lookup", arguments={"prompt_lookup_num_tokens": length}),
        Way("autoregressive", choices.settings("autoregressive")),
        Way("vanilla-stop", choices.settings("vanilla"), drafts=True),
        Way(
            "vanilla-tree", choices.settings("vanilla", confidence_threshold=0.0, tree_leaves=TREE_LEAVES), drafts=True
        ),
        Way("auto", choices.settings("auto"), drafts=True),
        Way("specbranch", choices.settings("specbranch"), drafts=True),
        Way(
            "specbranch-outcomes",
            choices.settings("specbranch", max_rejection_branches=REJECTION_BRANCHES),
            drafts=True,
        ),
        Way("specbranch-tree", choices.settings("specbranch", **tree), drafts=True),
        Way("specbranch-one-branch", choices.settings("specbranch", max_branches=1), drafts=True),
        Way("specbranch-no-overlap", choices.settings("specbranch", overlap=False), drafts=True),
    ]
    if head is not None:
        ways.append(Way("specbranch-head", choices.settings("specbranch"), drafts=True, head=head))
    return {way.name: way for way in ways if way.name in names}


def candidates(
    name: str, choices: Choices, lengths: tuple[int, ...], thresholds: tuple[float, ...] = ()
) -> list[SpecBranchConfig]:
    """What a sweep tries for one of the `SWEPT` ways."""
    policy = name.removesuffix("-best")
    if policy != "specbranch":  # fixed lengths: no confidence stop
        return [choices.settings(policy, max_draft_length=length, confidence_threshold=0.0) for length in lengths]
    extra = [{"confidence_threshold": threshold} for threshold in thresholds] or [{}]
    return [choices.settings(policy, max_draft_length=length, **more) for length in lengths for more in extra]
