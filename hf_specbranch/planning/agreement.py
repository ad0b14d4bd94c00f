"""What a draft makes of a target's own text: the recording that every prediction starts from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

ABSENT = -1  # the target's token is not among the recorded candidates


@dataclass(frozen=True)
class Agreement:
    """One greedy text, and what the draft made of each of its tokens.

    Args:
        confidence: the draft's largest probability at each new token.
        rank: where the target's token stood among the draft's candidates: 0 first, `ABSENT` none of them.
        candidates: how many were looked at; branches beyond that cannot be replayed.
        chances: the probabilities of these candidates at each new token, the likeliest first; needed to replay branches
            for corrections (`max_rejection_branches`), and nothing else.

    Example:
        >>> from hf_specbranch.planning.simulate import Agreement
        >>> Agreement(confidence=(0.9, 0.5, 0.8, 0.2), rank=(0, 0, 1, -1), candidates=4).rate
        0.5
    """

    confidence: tuple[float, ...]
    rank: tuple[int, ...]
    candidates: int
    chances: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        if len(self.confidence) != len(self.rank) or not self.rank:
            raise ValueError(
                f"{len(self.confidence)} confidences and {len(self.rank)} ranks: expected as many of one as of the "
                f"other, at least one"
            )
        if self.chances and len(self.chances) != len(self.rank):
            raise ValueError(f"chances at {len(self.chances)} of {len(self.rank)} tokens: expected all or none")

    def __hash__(self) -> int:
        return hash(self.rank)  # of a thousand numbers these tell texts apart, in a fraction of the time

    @property
    def rate(self) -> float:
        """How often the draft's first candidate was the target's token."""
        return self.within(1)

    def within(self, count: int) -> float:
        """How often the target's token was among the draft's first `count` candidates."""
        return sum(0 <= rank < count for rank in self.rank) / len(self.rank)

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Agreement:
        """The inverse of `to_dict`."""
        chances = tuple(map(tuple, fields.get("chances", ())))
        return cls(tuple(fields["confidence"]), tuple(fields["rank"]), fields["candidates"], chances)


@torch.no_grad()
def record_agreement(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    max_new_tokens: int = 64,
    candidates: int = 8,
) -> Agreement:
    """Generate greedily with the target alone, then let the draft read that text once.

    Args:
        target: the large model.
        draft: the small one, with the same tokenizer.
        inputs: one tokenized prompt.
        max_new_tokens: how much text to look at.
        candidates: how many of the draft's likeliest tokens to keep at each position.

    Example:
        >>> from hf_specbranch import load_demo_pair
        >>> from hf_specbranch.planning.simulate import record_agreement
        >>> target, draft, tokenizer = load_demo_pair()
        >>> agreement = record_agreement(target, draft, tokenizer("def add(a, b):", return_tensors="pt"), 16)
        >>> len(agreement.rank)
        16
    """
    plain: dict[str, Any] = {"specbranch": False} if hasattr(target, "specbranch_stats") else {}
    text = target.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, **plain)  # [1, L]
    before = inputs["input_ids"].shape[1]
    return read_agreement(draft, text, before, candidates)


@torch.no_grad()
def read_agreement(
    draft: PreTrainedModel, text: Tensor, before: int, candidates: int = 8, temperature: float = 1.0
) -> Agreement:
    """What the draft makes of a text the target has already written; one pass of the draft.

    Of a text that is longer than the draft's context only the end is read.

    Args:
        draft: the small model.
        text: [1, L] prompt and continuation, greedy.
        before: tokens of the prompt.
        candidates: as in `record_agreement`.
        temperature: at which the text was drawn.
    """
    limit: int | None = getattr(draft.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and text.shape[1] > limit:  # a longer text has no positions: only its end is read
        before = max(1, before - (text.shape[1] - limit))
        text = text[:, -limit:]
    own = text.to(draft.device).clamp(max=draft.get_input_embeddings().weight.shape[0] - 1)  # it may know fewer
    return agreement_with(draft(input_ids=own, use_cache=False).logits, text, before, candidates, temperature)


def agreement_with(
    logits: Tensor, text: Tensor, before: int, candidates: int = 8, temperature: float = 1.0
) -> Agreement:
    """The same, given the logits [1, L, V] of that pass."""
    read, logits = text.to(logits.device), logits[0, before - 1 : -1] / temperature  # [N, V]
    top = logits.float().softmax(-1).topk(min(candidates, logits.shape[-1]), dim=-1)
    same = top.indices == read[0, before:, None]  # [N, K]
    rank = torch.where(same.any(1), same.long().argmax(1), ABSENT)
    chances = tuple(map(tuple, top.values.tolist()))
    return Agreement(tuple(each[0] for each in chances), tuple(rank.tolist()), top.indices.shape[1], chances)


def save_agreements(agreements: Sequence[Agreement], path: str | Path) -> None:
    """Write recordings as JSON, as `hf-specbranch doctor --recording` and `trace` do."""
    Path(path).write_text(json.dumps([each.to_dict() for each in agreements]) + "\n", encoding="utf-8")


def load_agreements(path: str | Path) -> list[Agreement]:
    """Read what `save_agreements` wrote.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        return [Agreement.from_dict(fields) for fields in json.loads(Path(path).read_text(encoding="utf-8"))]
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: no recording of agreement; `hf-specbranch doctor --recording` writes one") from error


class Texts:
    """How the draft did on the last few texts, each as far as it has come. Several may be generated at a time.

    Args:
        most: how many are remembered.

    Example:
        >>> texts = Texts(most=2)
        >>> first, second = texts.begin(), texts.begin()
        >>> texts.remember(first, ["half"])
        ['half']
        >>> texts.remember(first, ["whole"])
        ['whole']
        >>> texts.remember(second, ["other"])
        ['whole', 'other']
    """

    def __init__(self, most: int) -> None:
        self.most, self.lock, self.numbers = most, Lock(), count()
        self.found: dict[int, list[Agreement]] = {}  # the latest last

    def begin(self) -> int:
        """A name for a text."""
        return next(self.numbers)

    def remember(self, text: int, found: list[Agreement]) -> list[Agreement]:
        """Put this in place of what was known of a text, if it is anything; all that is known then."""
        with self.lock:
            if found:
                self.found.pop(text, None)
                self.found[text] = found
            for oldest in list(self.found)[: -self.most]:
                del self.found[oldest]
            return [agreement for some in self.found.values() for agreement in some]


@lru_cache(maxsize=8)
def ordinary_text(candidates: int) -> Agreement:
    """What an ordinary draft makes of an ordinary text: to plan by before anything is seen of either.

    Made up, and always the same: stretches of 16 tokens, easy ones and hard ones in turns, of which the draft has 9 of
    10 and half. Of what it has not, its second choice is right in 4 of 10 cases; of the rest its third, and so on.

    Args:
        candidates: how many of the draft's choices are looked at.

    Example:
        >>> round(ordinary_text(candidates=5).rate, 1)
        0.7
    """
    dice, ranks, chances = Random(0), [], []
    for position in range(256):
        right = 0.5 if position // 16 % 2 else 0.9
        others = [(1 - right) * 0.4 * 0.6**further for further in range(candidates - 1)]
        known = (right, *others)
        ranks += dice.choices([*range(candidates), ABSENT], [*known, 1 - sum(known)])
        chances.append(known)
    return Agreement(tuple(known[0] for known in chances), tuple(ranks), candidates, tuple(chances))
