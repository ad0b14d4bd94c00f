"""Traffic: sequences of calls whose prompt lengths and batch sizes change, as in real use.

Four kinds:

- *mixed*: prompts from short to long in random order, then the same list again.
- *chat*: the prompt of each turn is the whole text of the turn before and some new tokens; once as a plain prompt, once
  with `past_key_values`.
- *batches*: batch sizes that change from call to call, then the same list again.
- *requests*: random lengths and batch sizes.

Prompts are made from texts that are shuffled and cut, so that any length has realistic tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from .methods import Pair

if TYPE_CHECKING:
    from torch import Tensor

MIXED, MIXED_AGAIN = "mixed", "mixed, again"
CHAT, CHAT_CACHED = "chat", "chat, with cache"
BATCHES, BATCHES_AGAIN = "batches", "batches, again"
REQUESTS = "requests"

LONGEST = 5000  # tokens of the longest prompt; the other lengths below are scaled with it
SHORTEST = 50
CHAT_LENGTHS = (200, 4000)
BATCH_LENGTH = 256
SHORTEST_SCALED = 8
SHORTEST_LONGEST = 32  # the least that the longest prompt may be scaled to


@dataclass(frozen=True)
class Traffic:
    """What to replay.

    Args:
        max_new_tokens: generated tokens of every call, per row; texts do not end earlier.
        max_length: tokens of the longest prompt. Shorter ones are scaled with it.
        mixed: number of prompts of mixed length.
        turns: most turns of a chat; there are fewer where answers fill the space.
        batch_sizes: of one pass over changing batch sizes.
        requests: number of random requests.
        steady_runs: repetitions of a call, of which the fastest is its steady time.
        compared: calls of each kind whose tokens are compared with plain `generate()`.
        warm_up: warm up explicitly before the first call.
        seed: of lengths, order and prompts.

    Example:
        >>> Traffic(max_length=500).scaled(200)
        20
    """

    max_new_tokens: int = 128
    max_length: int = LONGEST
    mixed: int = 16
    turns: int = 16
    batch_sizes: tuple[int, ...] = (1, 4, 1, 4, 2, 1, 8, 1)
    requests: int = 200
    steady_runs: int = 3
    compared: int = 2
    warm_up: bool = False
    seed: int = 0

    def scaled(self, length: int) -> int:
        """Return a length for prompts of up to `LONGEST` tokens, scaled to the longest prompt of this traffic."""
        return max(SHORTEST_SCALED, round(length * self.max_length / LONGEST))

    def mixed_lengths(self) -> list[int]:
        """Return prompt lengths from the shortest to the longest, at equal ratios, in random order."""
        first, last = self.scaled(SHORTEST), self.max_length
        steps = max(1, self.mixed - 1)
        lengths = [round(first * (last / first) ** (at / steps)) for at in range(self.mixed)]
        Random(self.seed).shuffle(lengths)
        return lengths

    def chat_lengths(self) -> list[int]:
        """Return the prompt length of each turn. Each holds the turn before, its answer and new tokens."""
        first, last = (self.scaled(length) for length in CHAT_LENGTHS)
        even = (last - first) // max(1, self.turns - 1)
        return list(range(first, last + 1, max(self.max_new_tokens + 4, even)))[: self.turns]

    def batch_lengths(self) -> list[tuple[int, ...]]:
        """Return the prompt lengths of the rows of each batch; rows after the first are shorter, and are padded."""
        chance, full = Random(self.seed + 1), self.scaled(BATCH_LENGTH)
        return [self._rows(chance, full, size) for size in self.batch_sizes]

    def request_lengths(self) -> list[tuple[int, ...]]:
        """Return the prompt lengths of the rows of random requests."""
        chance, sizes = Random(self.seed + 2), sorted(set(self.batch_sizes))
        first, last = self.scaled(SHORTEST), self.max_length
        longest = [round(first * (last / first) ** chance.random()) for _ in range(self.requests)]
        return [self._rows(chance, length, chance.choice(sizes)) for length in longest]

    def _rows(self, chance: Random, length: int, size: int) -> tuple[int, ...]:
        return length, *(chance.randint(length // 2, length) for _ in range(size - 1))


@dataclass(frozen=True, eq=False)
class Item:
    """One call of the traffic.

    Args:
        prompts: tokens of each row.
        cached: tokens of the first row whose keys and values are passed in with the call; None: no cache is passed in.
    """

    prompts: list[list[int]]
    cached: int | None = None

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.prompts))


class TextSource:
    """Makes prompts of any length from given texts.

    Args:
        pair: its tokenizer is used.
        texts: shuffled and joined; the last one stays whole if there is room, so that a prompt ends as a text does.
        seed: the same seed gives the same prompts.
    """

    def __init__(self, pair: Pair, texts: list[str], seed: int) -> None:
        self.pieces: list[list[int]] = [pair.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        self.pieces = [piece for piece in self.pieces if piece]
        if not self.pieces:
            raise ValueError("the prompts hold no tokens: expected texts to make longer prompts from")
        marked = pair.tokenizer(texts[0])["input_ids"]
        bare = pair.tokenizer(texts[0], add_special_tokens=False)["input_ids"]
        self.start: list[int] = marked[: len(marked) - len(bare)]  # e.g. a beginning-of-sequence token
        self.chance = Random(seed)
        self.vocabulary = sorted({token for piece in self.pieces for token in piece})

    def tokens(self, length: int) -> list[int]:
        """Return exactly `length` tokens."""
        found: list[int] = []
        while len(found) < length:
            found = self.chance.choice(self.pieces) + found
        return found[len(found) - length :]

    def prompt(self, length: int) -> list[int]:
        """Return a prompt of exactly this length."""
        return (self.start + self.tokens(max(0, length - len(self.start))))[:length]


def inputs_of(item: Item, pair: Pair) -> dict[str, Tensor]:
    """Return `input_ids` [B, P] and `attention_mask` [B, P], padded on the left."""
    pad, length = pad_token(pair), item.length
    ids = [[pad] * (length - len(row)) + row for row in item.prompts]
    mask = [[0] * (length - len(row)) + [1] * len(row) for row in item.prompts]
    device = pair.target.device
    import torch

    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


def pad_token(pair: Pair) -> int:
    """Return the token that fills shorter rows; it is never attended to."""
    config: Any = pair.target.generation_config
    named = (getattr(pair.tokenizer, "pad_token_id", None), config.pad_token_id)
    return int(next((token for token in named if token is not None), 0))


def fitting_length(pair: Pair, longest: int, max_new_tokens: int) -> int:
    """Return the longest prompt up to `longest` tokens that leaves room for the answer in the context of both models.

    Raises:
        ValueError: the context is too short for any traffic.
    """
    configs = [model.config.get_text_config(decoder=True) for model in (pair.target, pair.draft)]
    contexts = [getattr(config, "max_position_embeddings", None) for config in configs]
    context = min((found for found in contexts if found), default=longest + max_new_tokens)
    fits = min(longest, context - max_new_tokens)
    if fits < SHORTEST_LONGEST:
        raise ValueError(
            f"--max-new-tokens {max_new_tokens} leaves {max(0, fits)} tokens of the models' context ({context}) for "
            f"prompts: expected at least {SHORTEST_LONGEST}, so give a smaller --max-new-tokens"
        )
    return fits
