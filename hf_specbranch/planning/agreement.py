"""How a draft agrees with a text that the target has written: the recording that every prediction starts from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from inspect import signature
from itertools import count
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

# All but cuDNN's, which takes 40 ms on an H200 to plan for each new length of text.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
ABSENT = -1  # the target's token is not among the recorded candidates


@dataclass(frozen=True)
class Agreement:
    """One text of the target, and the draft's predictions at each of its new tokens.

    Args:
        confidence: the draft's largest probability at each new token.
        rank: the rank of the target's token among the draft's candidates: 0 for the first, `ABSENT` if it is not one.
        candidates: how many candidates were recorded per position. A replay cannot use more branches than that.
        chances: the probabilities of these candidates at each new token, in descending order. Only a replay with
            rejection branches or tree leaves needs them.
        lookups: how many tokens from each new one on a lookup would have got right, if it was likely enough to be right
            to be asked; else `ABSENT`.

    Example:
        >>> from hf_specbranch.planning import Agreement
        >>> Agreement(confidence=(0.9, 0.5, 0.8, 0.2), rank=(0, 0, 1, -1), candidates=4).rate
        0.5
    """

    confidence: tuple[float, ...]
    rank: tuple[int, ...]
    candidates: int
    chances: tuple[tuple[float, ...], ...] = ()
    lookups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.confidence) != len(self.rank) or not self.rank:
            raise ValueError(
                f"{len(self.confidence)} confidences and {len(self.rank)} ranks: expected the same number of both, at "
                f"least one"
            )
        if self.chances and len(self.chances) != len(self.rank):
            raise ValueError(f"chances at {len(self.chances)} of {len(self.rank)} tokens: expected all or none")
        if self.lookups and len(self.lookups) != len(self.rank):
            raise ValueError(f"lookups at {len(self.lookups)} of {len(self.rank)} tokens: expected all or none")

    def __hash__(self) -> int:
        return hash(self.rank)  # ranks suffice to tell texts apart, and hash much faster than all the floats

    @property
    def rate(self) -> float:
        """The fraction of tokens at which the draft's first candidate was the target's token."""
        return self.within(1)

    def within(self, count: int) -> float:
        """Return the fraction of tokens at which the target's token was among the draft's first `count` candidates."""
        return sum(0 <= rank < count for rank in self.rank) / len(self.rank)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Agreement:
        """Build a recording from what `to_dict` returned."""
        chances = tuple(map(tuple, fields.get("chances", ())))
        lookups = tuple(fields.get("lookups", ()))
        return cls(tuple(fields["confidence"]), tuple(fields["rank"]), fields["candidates"], chances, lookups)


@torch.no_grad()
def record_agreement(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    max_new_tokens: int = 64,
    candidates: int = 8,
) -> Agreement:
    """Generate a greedy text with the target alone, then run the draft over it once.

    Args:
        target: the target model.
        draft: the draft model, with the same tokenizer.
        inputs: one tokenized prompt.
        max_new_tokens: the number of tokens to generate.
        candidates: how many of the draft's most likely tokens to record per position.

    Example:
        >>> from hf_specbranch import load_demo_pair
        >>> from hf_specbranch.planning import record_agreement
        >>> target, draft, tokenizer = load_demo_pair()
        >>> agreement = record_agreement(target, draft, tokenizer("def add(a, b):", return_tensors="pt"), 16)
        >>> len(agreement.rank)
        16
    """
    plain: dict[str, Any] = {"specbranch": False} if hasattr(target, "specbranch_stats") else {}
    text = target.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, **plain)  # [1, L]
    return read_agreement(draft, text, inputs["input_ids"].shape[1], candidates)


@torch.no_grad()
def read_agreement(
    draft: PreTrainedModel,
    text: Tensor,
    prompt_length: int,
    candidates: int = 8,
    temperature: float = 1.0,
    tokens: Tensor | None = None,
) -> Agreement:
    """Record the agreement with a text that the target has already written; takes one forward pass of the draft.

    If the text is longer than the draft's context, only its end is read.

    Args:
        draft: the draft model.
        text: [1, L] prompt and continuation.
        prompt_length: tokens of the prompt.
        candidates: as in `record_agreement`.
        temperature: the temperature at which the text was sampled.
        tokens: [S] the tokens that the draft scores, if not all.
    """
    limit: int | None = getattr(draft.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and text.shape[1] > limit:
        prompt_length = max(1, prompt_length - (text.shape[1] - limit))
        text = text[:, -limit:]
    # The draft's vocabulary may be smaller than the target's.
    own = text.to(draft.device).clamp(max=draft.get_input_embeddings().weight.shape[0] - 1)
    new = text.shape[1] - prompt_length
    keeps = "logits_to_keep" in signature(draft.forward).parameters  # logits of a long prompt would take much memory
    last = {"logits_to_keep": new + 1} if keeps else {}
    with sdpa_kernel(ATTENTION):
        logits = draft(input_ids=own, use_cache=False, **last).logits[:, -new - 1 :]  # [1, N + 1, V]
    return agreement_from_logits(logits, text[:, -new - 1 :], 1, candidates, temperature, tokens)


def agreement_from_logits(
    logits: Tensor,
    text: Tensor,
    prompt_length: int,
    candidates: int = 8,
    temperature: float = 1.0,
    tokens: Tensor | None = None,
) -> Agreement:
    """Do the same, given the draft's logits [1, L, V] over the text [1, L], or [1, L, S] over `tokens`."""
    text, logits = text.to(logits.device), logits[0, prompt_length - 1 : -1] / temperature  # [N, V]
    top = logits.float().softmax(-1).topk(min(candidates, logits.shape[-1]), dim=-1)
    likeliest = top.indices if tokens is None else tokens[top.indices]
    same = likeliest == text[0, prompt_length:, None]  # [N, K]
    rank = torch.where(same.any(1), same.long().argmax(1), ABSENT)
    chances = tuple(map(tuple, top.values.tolist()))
    return Agreement(tuple(each[0] for each in chances), tuple(rank.tolist()), top.indices.shape[1], chances)


def save_agreements(agreements: Sequence[Agreement], path: str | Path) -> None:
    """Write recordings as JSON, as `hf-specbranch doctor --recording` and `trace` do."""
    Path(path).write_text(json.dumps([each.to_dict() for each in agreements]) + "\n", encoding="utf-8")


def load_agreements(path: str | Path) -> list[Agreement]:
    """Read the recordings that `save_agreements` wrote.

    Raises:
        ValueError: if the file holds something else.
    """
    try:
        return [Agreement.from_dict(fields) for fields in json.loads(Path(path).read_text(encoding="utf-8"))]
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: no recording of agreement; `hf-specbranch doctor --recording` writes one") from error


class RecentTexts:
    """The recordings of the last few texts. Safe to use from several generations at once.

    A text is re-recorded as it grows; the new recording replaces the old one.

    Args:
        limit: how many texts are kept.

    Example:
        >>> texts = RecentTexts(limit=2)
        >>> first, second = texts.begin(), texts.begin()
        >>> texts.update(first, ["half"])
        ['half']
        >>> texts.update(first, ["whole"])
        ['whole']
        >>> texts.update(second, ["other"])
        ['whole', 'other']
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.lock, self.ids = limit, Lock(), count()
        self.recordings: dict[int, list[Agreement]] = {}  # by text, the most recent last

    def begin(self) -> int:
        """Return an id for a new text."""
        return next(self.ids)

    def update(self, text: int, recordings: list[Agreement]) -> list[Agreement]:
        """Replace the recordings of a text, unless the new list is empty; return those of all texts."""
        with self.lock:
            if recordings:
                self.recordings.pop(text, None)
                self.recordings[text] = recordings
            for oldest in list(self.recordings)[: -self.limit]:
                del self.recordings[oldest]
            return self._all()

    def all(self) -> list[Agreement]:
        """Return the recordings of all texts, the most recent last."""
        with self.lock:
            return self._all()

    def _all(self) -> list[Agreement]:
        return [agreement for recordings in self.recordings.values() for agreement in recordings]


@lru_cache(maxsize=8)
def typical_agreement(candidates: int) -> Agreement:
    """Return a made-up recording of a typical draft on a typical text, to plan by before anything is recorded.

    It is the same in every process: runs of 16 tokens, easy and hard in turn. The draft's first candidate is right with
    probability 0.9 on easy ones, and with 0.3 or 0.7 on hard ones, and the draft is as confident as that. Where it is
    wrong, the second candidate is right with probability 0.4; where that is wrong too, the third, and so on.

    Args:
        candidates: how many candidates to record per position.

    Example:
        >>> round(typical_agreement(candidates=5).rate, 1)
        0.7
    """
    random, ranks, chances = Random(0), [], []
    for position in range(128):
        first = (0.3, 0.7)[position % 2] if position // 16 % 2 else 0.9
        alternatives = [(1 - first) * 0.4 * 0.6**further for further in range(candidates - 1)]
        probabilities = (first, *alternatives)
        ranks += random.choices([*range(candidates), ABSENT], [*probabilities, 1 - sum(probabilities)])
        chances.append(probabilities)
    return Agreement(tuple(each[0] for each in chances), tuple(ranks), candidates, tuple(chances))
