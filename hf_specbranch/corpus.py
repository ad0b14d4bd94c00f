"""A corpus for lookup drafts: token sequences in which the end of a text may be found again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .decoding.text_index import NO_MATCH, Match

ORDER = 3  # tokens that must match at least
CANDIDATES = 8  # occurrences that are compared
BETWEEN = -1  # stands between two sequences
LARGEST = 2**31 - 1  # token that a file can hold
FORMAT = "hf-specbranch-corpus-1"
_FACTOR = 6364136223846793005  # odd: products of int64 wrap around, and no token is lost
_serials = count()


class CorpusTables(NamedTuple):
    """A corpus as tensors on one device."""

    tokens: Tensor  # [N] all sequences, with `BETWEEN` before, between and after them
    keys: Tensor  # [K] hashes of all runs of `ORDER` tokens, in ascending order
    places: Tensor  # [K] the index of the token after each run


class LookupCorpus:
    """Token sequences in which lookup drafts are found: documents, a repository, earlier answers.

    Args:
        sequences: token ids, of the target's tokenizer.

    Example:
        >>> corpus = LookupCorpus([[5, 6, 7, 8, 9]])
        >>> corpus.match([1, 5, 6, 7], count=4)
        Match(length=3, tokens=[8, 9])
    """

    def __init__(self, sequences: Iterable[Sequence[int] | Tensor]) -> None:
        border = torch.full((1,), BETWEEN)
        parts = [border]
        for sequence in sequences:
            parts += [_token_ids(sequence), border]
        self._build(torch.cat(parts))

    @classmethod
    def from_texts(cls, texts: Iterable[str], tokenizer: Any) -> LookupCorpus:
        """Tokenize texts, without special tokens."""
        return cls(tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)

    def _build(self, tokens: Tensor) -> None:
        self.serial = next(_serials)  # identifies this corpus in keys of captured stages
        self.largest = int(tokens.max())  # token; BETWEEN if there is none
        keys = hash_runs(tokens)
        inside = (tokens >= 0).unfold(0, ORDER, 1).all(1) if len(tokens) >= ORDER else keys.new_zeros(0).bool()
        places = torch.arange(ORDER, ORDER + len(keys))[inside]
        ordered = keys[inside].sort(stable=True)  # of equal runs, the latest comes last
        self.tables = {torch.device("cpu"): CorpusTables(tokens, ordered.values, places[ordered.indices])}

    def __len__(self) -> int:
        """Return the number of tokens."""
        return int((self.on(torch.device("cpu")).tokens >= 0).sum())

    def check_tokens(self, vocabulary: int) -> None:
        """Refuse a corpus of another tokenizer, if it has tokens that a target with so many tokens cannot read."""
        if self.largest >= vocabulary:
            raise ValueError(
                f"the corpus has the token {self.largest}, and the target has tokens 0 to {vocabulary - 1}: make it "
                f"with the target's tokenizer"
            )

    def on(self, device: torch.device) -> CorpusTables:
        """Return the tables on a device; they are kept there as long as the corpus exists."""
        if device not in self.tables:
            self.tables[device] = CorpusTables(*(each.to(device) for each in self.tables[torch.device("cpu")]))
        return self.tables[device]

    def match(self, ending: Sequence[int], count: int) -> Match:
        """Return the longest match of a text's end, and up to `count` tokens after it; on the host."""
        if len(ending) < ORDER:
            return NO_MATCH
        tokens, keys, places = self.on(torch.device("cpu"))
        key = hash_runs(torch.tensor(ending[-ORDER:]))
        last = int(torch.searchsorted(keys, key, right=True))
        first = max(int(torch.searchsorted(keys, key)), last - CANDIDATES)
        best, place = 0, 0
        for start in places[first:last].tolist()[::-1]:
            before = tokens[max(0, start - len(ending)) : start].tolist()[::-1]
            length = 0
            for ours, theirs in zip(reversed(ending), before):
                if ours != theirs:
                    break
                length += 1
            if length > best:
                best, place = length, start
        following = tokens[place : place + count].tolist()
        if best < ORDER or BETWEEN in following[:1]:  # two runs may have the same hash
            return NO_MATCH
        return Match(best, following[: following.index(BETWEEN)] if BETWEEN in following else following)

    def save(self, path: str | Path) -> None:
        """Write the token sequences to a safetensors file."""
        save_file({"tokens": self.tables[torch.device("cpu")].tokens.int()}, path, metadata={"format": FORMAT})

    @classmethod
    def load(cls, path: str | Path) -> LookupCorpus:
        """Read a file that `save` wrote.

        Raises:
            ValueError: if there is none, or it holds something else.
        """
        try:
            with safe_open(path, "pt") as file:
                is_corpus = (file.metadata() or {}).get("format") == FORMAT
                tokens = file.get_tensor("tokens") if is_corpus else torch.empty(0)
        except FileNotFoundError:
            raise ValueError(f"corpus {path}: there is no such file") from None
        except (SafetensorError, OSError) as error:
            raise ValueError(f"corpus {path}: {error}") from error
        integers = tokens.ndim == 1 and not tokens.is_floating_point()
        if not integers or not len(tokens) or tokens[[0, -1]].tolist() != [BETWEEN] * 2 or tokens.min() < BETWEEN:
            raise ValueError(f"corpus {path}: expected a file that LookupCorpus.save() wrote")
        corpus = cls.__new__(cls)
        corpus._build(tokens.long())
        return corpus


def _token_ids(sequence: Any) -> Tensor:
    """[N] the tokens of a sequence; anything but token ids is refused."""
    try:
        tokens = torch.as_tensor(sequence).cpu()
    except (TypeError, ValueError, RuntimeError):
        tokens = torch.tensor(False)
    integers = not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)
    if tokens.ndim == 0 or (tokens.numel() and not integers):
        raise ValueError(f"a sequence of the corpus is {str(sequence)[:80]}: expected a list of token ids")
    tokens = tokens.flatten().long()
    if outside := [token for token in (tokens.aminmax() if len(tokens) else ()) if not 0 <= int(token) <= LARGEST]:
        raise ValueError(
            f"a sequence of the corpus has the token {int(outside[0])}: expected ids from 0 on, up to {LARGEST}"
        )
    return tokens


def hash_runs(tokens: Tensor) -> Tensor:
    """Return a hash [..., N - ORDER + 1] of each run of `ORDER` tokens in [..., N]."""
    size = tokens.shape[-1] - ORDER + 1
    if size <= 0:
        return tokens[..., :0]
    key = tokens[..., :size]
    for further in range(1, ORDER):
        key = key * _FACTOR + tokens[..., further : further + size]
    return key
