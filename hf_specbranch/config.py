"""The settings of speculation."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

POLICIES = ("auto", "autoregressive", "vanilla", "pearl", "specbranch")
RUNTIMES = ("auto", "eager", "graph")
DRAFT_SAMPLING = ("auto", "greedy", "sample")
DRAFT_WEIGHTS = ("auto", "float8", "int8", None)
DEFAULT_DRAFT_LENGTH = 8
# An eager draft step costs a large part of a target pass, so it pays to stop early. A captured draft runs in one stage,
# with all its steps, if the threshold is below STEPWISE; then only the tokens per pass count. From there on each step
# is a stage of its own, and the host stops the draft (`stepwise_drafter`), which pays if a step takes long: one of a
# 0.5B draft took 0.55 ms where its target took 1.4 ms per pass, one of a 68M draft 0.05 ms where a 7B target took 3.6.
DEFAULT_THRESHOLD, DEFAULT_CAPTURED_THRESHOLD = 0.4, 0.02
# Such a draft stops where a further step would cost more than it is likely to save (`step_worth`), unless the user has
# set a threshold. COST_THRESHOLD takes the place of that where the host does not stop a draft.
STEPWISE, BY_COST, COST_THRESHOLD = 0.1, "cost", 0.6
CAPTURED_LENGTH = 4  # gamma in one captured stage for a draft that is not cheap; others take the default
REJECTION_BRANCHES, FEW_REJECTION_BRANCHES = 12, 4  # for a cheap draft, and for one that is not
BLOCK_SIZE = 16  # tokens that our kernels process in about the time of one; captured passes over drafts stay within it
LOOKUP_TOKENS = 31  # with the token before them two blocks
LOOKUP_BESIDE_LEAVES = 30  # a pass with tree leaves also reads the token before that again
TREE_LEAVES = 6  # with 8 draft tokens, the token before them and one that is read again: a block


Class = TypeVar("Class", bound=type[Any])


def with_old_names(**new_names: str) -> Any:
    """A class decorator: keyword arguments and attributes are also found under their old names.

    Example:
        >>> @with_old_names(colour="color")
        ... class Pen:
        ...     def __init__(self, color):
        ...         self.color = color
        >>> Pen(color="red").color
        'red'
    """

    def decorate(cls: Class) -> Class:
        original = cls.__init__

        @wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **renamed(cls.__name__, kwargs, new_names))

        def read(self: Any, name: str) -> Any:  # called where ordinary lookup finds nothing
            if name not in new_names:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            warn(cls.__name__, name, new_names[name])
            return getattr(self, new_names[name])

        cls.__init__ = init
        cls.__getattr__ = read
        return cls

    return decorate


def renamed(owner: str, given: Mapping[str, Any], new_names: Mapping[str, str]) -> dict[str, Any]:
    """The same settings under their new names."""
    settings = dict(given)
    for old in set(settings) & set(new_names):
        new = new_names[old]
        if new in settings:
            raise ValueError(f"{owner} was given both {old} and {new}, which is its new name: pass {new} only")
        warn(owner, old, new)
        settings[new] = settings.pop(old)
    return settings


def warn(owner: str, old: str, new: str) -> None:
    warnings.warn(f"{owner}.{old} is now called {new}; the old name goes with the next release", FutureWarning, 4)


MEMORY_BUDGET = 0.3
RENAMED = {"max_outcomes": "max_rejection_branches", "runners_up": "tree_leaves"}


@with_old_names(**RENAMED)
@dataclass(frozen=True)
class SpecBranchConfig:
    """Settings of one speculative generation.

    Validated on creation; never changes afterwards. It can be passed to `generate(specbranch=...)`, kept in a
    `GenerationConfig` (`GenerationConfig(specbranch=config.to_dict())`) or in a JSON file.

    Args:
        policy: "auto" measures what a step of each model costs and how often the target agrees with the draft on this
            text, and chooses one of the other policies and every setting below that is "auto". The others do not
            change during a call: "specbranch" (branches and adaptive length, as in the paper), "pearl" (drafting ahead
            without branches), "vanilla" (draft, then verify), "autoregressive" (no draft).
        max_draft_length: gamma, the most tokens drafted in one go; "auto" takes `num_assistant_tokens` of the
            generation config, else 8, or 4 in captured stages for a draft that is not 50 times smaller than its target,
            unless it stops early (see below).
        confidence_threshold: epsilon. Drafting stops at the first position where the draft's largest probability is
            below it. 0 never stops: drafts of fixed length. "auto" takes `assistant_confidence_threshold` of the
            generation config, else 0.4. Where stages are captured as CUDA graphs and no head decides, it takes 0.02, or
            "cost" under "vanilla" for a draft that is not 50 times smaller than its target. "cost": a captured draft
            stops where a further step takes more time than its token is likely to save. Eager drafts, those that draft
            ahead, heads of the target and drafts with another tokenizer take 0.6 instead. From 0.1 on and by cost, a
            captured draft that stops takes no further steps.
        max_branches: k_max, the most branches at a branch point.
        max_rejection_branches: the most branches opened before the branch point, at the draft tokens most likely to be
            rejected, so that the target's correction is already continued ("specbranch" only). 0: branches at the
            branch point alone, as in the paper. "auto": what the policy "auto" chooses, and 0 under the others.
        tree_leaves: how many of the draft's second choices, at the draft tokens most likely to be rejected, the target
            verifies in the same pass ("vanilla" and "specbranch"); an accepted leaf adds one token to the pass. Leaves
            take no drafting, but make the pass wider. "auto": as for `max_rejection_branches`.
        prompt_lookup_num_tokens: the most tokens that a lookup proposes in one go: what followed where the end of the
            text occurred before, in the text itself or in a corpus. 0: no lookup. "auto": up to 31 under the policy
            "auto", or 30 beside tree leaves, where they are likely enough to be right, and 0 under the others. With the
            policy "autoregressive", lookup alone drafts.
        max_matching_ngram_size: the most tokens of a text's end that a lookup compares; "auto": 12.
        length_head: predicts for a draft 0 (send nothing), 1 (decide by confidence) or 2 (send all of it): the H-RAD of
            the paper. A `LengthHead`, its folder, its repository id (`org/head` or `org/head@revision`), "auto" to look
            for one on the Hub, or any callable (see `hf_specbranch.decoding.hooks`). None: no head.
        runtime: "eager" runs ordinary forwards; "graph" replays stages captured as CUDA graphs; "auto" takes graphs on
            CUDA and ordinary forwards elsewhere.
        overlap: run draft and target at the same time.
        kernels: in captured graphs, run the models through fewer, larger kernels of our own where their structure is
            recognised. "auto" does so in half precision and leaves float32 models, whose tokens must equal those of
            plain `generate()`, to transformers' own code; True and False decide for every dtype. The work
            between forwards uses kernels of our own in every dtype, unless this is False.
        draft_sampling: how drafts are made when sampling. "greedy": the draft's likeliest tokens, best at low
            temperature; "sample": tokens drawn from the draft, best at high temperature; "auto" chooses by
            temperature. Either way the output has exactly the target's distribution.
        draft_weights: how the draft's weights are stored in the copy that drafts: "float8" or "int8" takes half of the
            bytes of half precision, None takes the draft as it is. "auto" takes float8 where that is faster: on a GPU,
            for a draft that is not tiny. Only the draft is approximate; the output is the target's in any case.
        draft_shortlist: the tokens that the draft may propose, beside those of the text: a number (those with the
            lowest ids, which most tokenizers give to the most frequent ones), a JSON file with a list of ids, or None
            for all. "auto" takes a shortlist where that is faster: on a GPU, for a large vocabulary.
        memory_budget: the fraction of a GPU's memory that KV caches, buffers and graphs may keep between calls, for all
            models and batch sizes together. The least recently used are freed first. It does not limit a call that is
            running. If memory runs out, all that is kept is freed and the allocation is repeated.
        prefix_reuse: a prompt that begins like the last text is not read again from the start, while its keys and
            values are in memory and the weights are unchanged (`stats.reused_tokens`). One row, captured stages.

    Example:
        >>> from hf_specbranch import SpecBranchConfig
        >>> SpecBranchConfig(policy="pearl", max_draft_length=4).policy
        'pearl'
    """

    policy: str = "auto"
    max_draft_length: int | str = "auto"
    confidence_threshold: float | str = "auto"
    max_branches: int = 4
    max_rejection_branches: int | str = "auto"
    tree_leaves: int | str = "auto"
    prompt_lookup_num_tokens: int | str = "auto"
    max_matching_ngram_size: int | str = "auto"
    length_head: str | Path | Callable[..., Any] | None = None
    runtime: str = "auto"
    overlap: bool = True
    kernels: bool | str = "auto"
    draft_sampling: str = "auto"
    draft_weights: str | None = "auto"
    draft_shortlist: int | str | None = "auto"
    memory_budget: float = MEMORY_BUDGET
    prefix_reuse: bool = True

    def __post_init__(self) -> None:
        _one_of("policy", self.policy, POLICIES)
        if self.runtime == "compile":
            warnings.warn(
                'runtime="compile" is gone: it runs as "auto". The next release refuses it.', FutureWarning, 4
            )
            object.__setattr__(self, "runtime", "auto")
        _one_of("runtime", self.runtime, RUNTIMES)
        _one_of("draft_sampling", self.draft_sampling, DRAFT_SAMPLING)
        _one_of("draft_weights", self.draft_weights, DRAFT_WEIGHTS)
        if self.draft_shortlist is not None and not isinstance(self.draft_shortlist, str):
            _whole_number("draft_shortlist", self.draft_shortlist, or_else=', a JSON file, None or "auto"')
        if self.max_draft_length != "auto":
            _whole_number("max_draft_length", self.max_draft_length, or_else=' or "auto"')
        _whole_number("max_branches", self.max_branches)
        if self.max_matching_ngram_size != "auto":
            _whole_number("max_matching_ngram_size", self.max_matching_ngram_size, or_else=' or "auto"')
        for name in ("max_rejection_branches", "tree_leaves", "prompt_lookup_num_tokens"):
            if (given := getattr(self, name)) not in ("auto", 0) or isinstance(given, bool):
                _whole_number(name, given, or_else=', 0 or "auto"')
        epsilon = self.confidence_threshold
        is_number = isinstance(epsilon, (int, float)) and not isinstance(epsilon, bool)
        if epsilon not in ("auto", BY_COST) and not (is_number and 0 <= epsilon <= 1):  # type: ignore[operator]
            raise ValueError(f'confidence_threshold={epsilon!r}: expected a number from 0 to 1, "auto" or "{BY_COST}"')
        for name in ("overlap", "prefix_reuse"):
            if not isinstance(given := getattr(self, name), bool):
                raise ValueError(f"{name}={given!r}: expected True or False")
        budget = self.memory_budget
        if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 <= budget <= 1:
            raise ValueError(f"memory_budget={budget!r}: expected a fraction of the GPU's memory, from 0 to 1")
        if self.kernels != "auto" and not isinstance(self.kernels, bool):
            raise ValueError(f'kernels={self.kernels!r}: expected True, False or "auto"')
        if isinstance(self.length_head, Path):
            object.__setattr__(self, "length_head", str(self.length_head))
        head = self.length_head
        if not (head is None or isinstance(head, str) or callable(head)):
            raise ValueError(f"length_head={head!r}: expected None, a path, a repository id or a callable")

    @property
    def draft_form(self) -> tuple[str | None, int | str | None]:
        """The settings that say which copy of the draft drafts."""
        return self.draft_weights, self.draft_shortlist

    @property
    def draft_length(self) -> int:
        """gamma as a number."""
        return DEFAULT_DRAFT_LENGTH if isinstance(self.max_draft_length, str) else self.max_draft_length

    @property
    def stops_early(self) -> bool:
        """Whether a captured draft that stops takes no further steps; see `STEPWISE`."""
        return self.threshold() >= STEPWISE

    @property
    def stops_by_cost(self) -> bool:
        """Whether a captured draft stops where a further step costs more than it is likely to save."""
        return self.confidence_threshold == BY_COST

    @property
    def lookup_tokens(self) -> int:
        """The most tokens that a lookup proposes, as a number."""
        return 0 if isinstance(self.prompt_lookup_num_tokens, str) else self.prompt_lookup_num_tokens

    @property
    def captured_lookups(self) -> tuple[int, ...]:
        """How many tokens a lookup may propose in captured stages: as many as fill a block, or the most.

        On an H200, a pass of a 7B model takes 3.68 ms over one token, 3.97 over 16 and 4.12 over 32.

        Example:
            >>> SpecBranchConfig(prompt_lookup_num_tokens=31).captured_lookups
            (15, 31)
        """
        most, block = self.lookup_tokens, BLOCK_SIZE - 1 - (self.tree_leaves not in ("auto", 0))
        return (block, most) if most > block else (most,)

    def threshold(self, alone: bool = False) -> float:
        """Return epsilon as a number; `alone`: stages are captured, and no head or other hook decides."""
        if not isinstance(self.confidence_threshold, str):
            return self.confidence_threshold
        if self.stops_by_cost:
            return COST_THRESHOLD
        return DEFAULT_CAPTURED_THRESHOLD if alone else DEFAULT_THRESHOLD

    def decided(self, captured: bool = False, cheap: bool = True, alone: bool = True) -> SpecBranchConfig:
        """Return the same settings with a policy and numbers in place of "auto"; nothing is measured.

        Args:
            captured: stages are captured as CUDA graphs.
            cheap: the draft is small compared with its target.
            alone: no head or other hook decides.
        """
        large = captured and not cheap
        stepwise = large and alone and self.policy == "vanilla" and self.confidence_threshold == "auto"
        by_cost = stepwise or (captured and self.stops_by_cost)
        short = large and not by_cost and self.threshold(alone) < STEPWISE
        beyond = captured and self.policy == "auto"  # also what the paper does not have
        outcomes, leaves = self.max_rejection_branches, self.tree_leaves
        if outcomes == "auto":
            outcomes = 0 if not beyond else FEW_REJECTION_BRANCHES if large else REJECTION_BRANCHES
        if leaves == "auto":
            leaves = TREE_LEAVES if beyond else 0
        lookup = self.prompt_lookup_num_tokens
        if lookup == "auto":
            lookup = 0 if self.policy != "auto" else LOOKUP_BESIDE_LEAVES if leaves else LOOKUP_TOKENS
        return replace(
            self,
            policy="specbranch" if self.policy == "auto" else self.policy,
            max_draft_length=CAPTURED_LENGTH if short and self.max_draft_length == "auto" else self.draft_length,
            confidence_threshold=BY_COST if by_cost else self.threshold(alone=captured and alone),
            max_rejection_branches=outcomes,
            tree_leaves=leaves,
            prompt_lookup_num_tokens=lookup,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, ready for JSON.

        Raises:
            ValueError: if `length_head` is an object; only a path or a repository id can be written down.
        """
        if not (self.length_head is None or isinstance(self.length_head, str)):
            raise ValueError(
                f"length_head={self.length_head!r} is an object and cannot be written to JSON: save the head and "
                f"put its path here, or pass it to generate(length_head=...)"
            )
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> SpecBranchConfig:
        """Build the settings from the output of `to_dict`; unknown names are an error."""
        settings = renamed(cls.__name__, settings, RENAMED)
        names = [field.name for field in fields(cls)]
        if unknown := sorted(set(settings) - set(names)):
            raise ValueError(f"unknown SpecBranchConfig settings {unknown}: expected some of {names}")
        return cls(**settings)

    def to_json_file(self, path: str | Path) -> None:
        """Write the settings to a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def from_json_file(cls, path: str | Path) -> SpecBranchConfig:
        """Read the settings from a JSON file.

        Raises:
            ValueError: if there is none, or it holds something else.
        """
        try:
            settings = json.loads(Path(path).read_text())
            if not isinstance(settings, dict):
                raise ValueError("expected a JSON object, as `hf-specbranch tune` writes it")
            return cls.from_dict(settings)
        except FileNotFoundError:
            hint = f'; for the policy pass {{"policy": "{path}"}}' if str(path) in POLICIES else ""
            raise ValueError(f"settings {path}: there is no such file{hint}") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"settings {path}: {error}") from error


def _one_of(name: str, given: object, choices: tuple[str | None, ...]) -> None:
    if given not in choices:
        raise ValueError(f"{name}={given!r}: expected one of {', '.join(map(repr, choices))}")


def _whole_number(name: str, given: object, or_else: str = "") -> None:
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"{name}={given!r}: expected a whole number of at least 1{or_else}")
