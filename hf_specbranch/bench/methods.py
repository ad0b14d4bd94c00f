"""The methods that are compared: ways to generate the same tokens, transformers' own and ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_specbranch.config import REJECTION_BRANCHES, TREE_LEAVES, SpecBranchConfig

if TYPE_CHECKING:  # the names of the methods need neither
    from transformers import PreTrainedModel

    from ..heads import LengthHead

# Every method by name, in the order they run and are shown.
METHODS = {
    "plain": "generate()",
    "static": 'generate(cache_implementation="static"), which transformers compiles on CUDA',
    "assisted": "transformers' assisted decoding, drafts of constant length, no confidence stop",
    "assisted-default": "transformers' assisted decoding with its own defaults",
    "lookup": "transformers' prompt lookup",
    "autoregressive": "ours, no draft",
    "no-draft": "ours, the default without a draft model: text already seen is looked up where that pays",
    "vanilla-best": "ours, draft then verify, the best fixed length of the sweep",
    "vanilla-stop": "ours, draft then verify, with the confidence stop",
    "vanilla-tree": "ours, draft then verify, with tree leaves",
    "pearl-best": "ours, drafting ahead on one branch, the best fixed length of the sweep",
    "auto": "ours, the default: the planner chooses",
    "auto-no-lookup": "ours, the planner chooses, and only the draft model drafts",
    "specbranch": "ours, the method of the paper: branches at the branch point, overlap",
    "specbranch-rejections": "ours, with rejection branches",
    "specbranch-tree": "ours, with rejection branches and tree leaves",
    "specbranch-one-branch": "ours, a single branch",
    "specbranch-no-overlap": "ours, target and draft in turns",
    "specbranch-head": "ours, with a length head",
    "specbranch-best": "ours, the best draft length of the sweep",
}
DEFAULT_METHODS = tuple(name for name in METHODS if name not in ("auto-no-lookup", "specbranch-best"))
EAGER = ("plain", "assisted", "assisted-default", "lookup")  # nothing is captured or compiled
TRANSFORMERS = (*EAGER, "static")  # transformers' own methods
SWEPT = ("vanilla-best", "pearl-best", "specbranch-best")  # draft lengths known only after a sweep


class Pair(NamedTuple):
    """The models that every method runs on."""

    target: PreTrainedModel  # with SpecBranch attached
    draft: PreTrainedModel
    tokenizer: Any
    head: LengthHead | None = None


class Overrides(NamedTuple):
    """What the user set for our methods; None keeps the default of `SpecBranchConfig`."""

    max_draft_length: int | None = None
    confidence_threshold: float | None = None
    max_branches: int | None = None
    runtime: str = "auto"
    kernels: bool | str = "auto"
    draft_form: dict[str, Any] | None = None  # `draft_weights` and `draft_shortlist`, where None is a value

    def expected_runtime(self, device: str) -> str:
        """Return the runtime that our methods should use on this type of device."""
        return self.runtime if self.runtime != "auto" else "graph" if device == "cuda" else "eager"

    def settings(self, policy: str, **more: Any) -> SpecBranchConfig:
        """Return our settings for a policy; `more` takes precedence over what the user set."""
        given = {name: value for name, value in self._asdict().items() if value is not None and name != "draft_form"}
        return SpecBranchConfig(policy=policy, **{**given, **(self.draft_form or {}), **more})


@dataclass(frozen=True)
class Method:
    """One way to generate.

    Args:
        name: a key of `METHODS`.
        settings: ours; None for transformers' own methods.
        arguments: further arguments of `generate()`.
        drafts: whether `generate()` is given the draft model.
        draft_settings: set in the draft's generation config during the call, where transformers reads them.
        head: a length head to use.

    Example:
        >>> Method("plain").is_ours
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
        """Yield the arguments of `generate()`; restores the draft's generation config afterwards."""
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
        """Return title and settings, ready for JSON."""
        settings = None if self.settings is None else replace(self.settings, length_head=None).to_dict()
        return {
            "title": METHODS[self.name],
            "settings": settings,
            "arguments": {**self.arguments, **self.draft_settings},
            "length_head": self.head is not None,
        }


def check_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in the order of `METHODS`, in which they run; unknown names are refused."""
    if unknown := sorted(set(names) - set(METHODS)):
        raise ValueError(f"unknown methods {', '.join(unknown)}: expected some of {', '.join(METHODS)}")
    if not names:
        raise ValueError(f"no methods are named: expected some of {', '.join(METHODS)}")
    return tuple(name for name in METHODS if name in names)


def fixed_methods(names: tuple[str, ...], overrides: Overrides, head: LengthHead | None) -> dict[str, Method]:
    """Return the chosen methods whose settings need no sweep."""
    length = overrides.settings("vanilla").draft_length
    # Without a threshold and with a constant schedule, transformers drafts exactly this many tokens.
    constant = dict(
        num_assistant_tokens=length, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )

    def ours(name: str, policy: str, **more: Any) -> Method:
        drafts = name not in ("autoregressive", "no-draft")
        return Method(name, overrides.settings(policy, **more), drafts=drafts)

    methods = [
        Method("plain"),
        Method("static", arguments={"cache_implementation": "static"}),
        Method("assisted", drafts=True, draft_settings=constant),
        Method("assisted-default", drafts=True),
        Method("lookup", arguments={"prompt_lookup_num_tokens": length}),
        ours("autoregressive", "autoregressive"),
        ours("no-draft", "auto"),
        ours("vanilla-stop", "vanilla"),
        ours("vanilla-tree", "vanilla", confidence_threshold=0.0, tree_leaves=TREE_LEAVES),
        ours("auto", "auto"),
        ours("auto-no-lookup", "auto", prompt_lookup_num_tokens=0),
        ours("specbranch", "specbranch"),
        ours("specbranch-rejections", "specbranch", max_rejection_branches=REJECTION_BRANCHES),
        ours("specbranch-tree", "specbranch", max_rejection_branches=REJECTION_BRANCHES, tree_leaves=TREE_LEAVES),
        ours("specbranch-one-branch", "specbranch", max_branches=1),
        ours("specbranch-no-overlap", "specbranch", overlap=False),
    ]
    if head is not None:
        methods.append(replace(ours("specbranch-head", "specbranch"), head=head))
    return {method.name: method for method in methods if method.name in names}


def candidates(name: str, overrides: Overrides, lengths: tuple[int, ...]) -> list[SpecBranchConfig]:
    """Return the settings that a sweep tries for one of the `SWEPT` methods."""
    policy = name.removesuffix("-best")
    # Fixed lengths: no confidence stop.
    more = {} if policy == "specbranch" else {"confidence_threshold": 0.0}
    return [overrides.settings(policy, max_draft_length=length, **more) for length in lengths]
