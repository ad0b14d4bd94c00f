"""An output layer over a shortlist of the vocabulary: most tokens never appear, and their rows need not be read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from .packed_linear import Bits8, PackedLinear

ROOM = 1024  # tokens of the text that may be added, at most as many as are fixed
# The logit of all other tokens. It is finite: where processors forbid the whole shortlist, others remain possible.
FILLER = -3e4


class Shortlist:
    """The tokens that a draft scores: fixed ones, and those of the text that are not among them.

    Attributes:
        layer: the output layer over the shortlist, whose rows belong to `ids`.
        ids: [S] the tokens, each once.

    Args:
        output: the draft's own output layer, over all tokens; not changed.
        tokens: the fixed ones.
        kind: how the rows are stored; None as they are.

    Example:
        >>> output = nn.Linear(4, 10, bias=False)
        >>> shortlist, x = Shortlist(output, [2, 5], None), torch.ones(1, 4)
        >>> full = shortlist.expand(shortlist.layer(x))
        >>> bool(full[0, 5] == output(x)[0, 5]), full.shape
        (True, torch.Size([1, 10]))
    """

    def __init__(self, output: nn.Linear, tokens: Iterable[int], kind: Bits8 | None) -> None:
        self.weight, self.bias, self.vocabulary = output.weight, output.bias, output.weight.shape[0]
        self.fixed = frozenset(token for token in tokens if 0 <= token < self.vocabulary)
        # Room that the text does not need holds other tokens, so that no token appears twice.
        others = (token for token in range(self.vocabulary) if token not in self.fixed)
        self.others = [token for token, _ in zip(others, range(min(ROOM, len(self.fixed))))]
        self.room = self.others
        self.ids = torch.tensor([*sorted(self.fixed), *self.others], device=output.weight.device)
        self.layer = self._layer_of_rows(kind)

    @torch.no_grad()
    def _layer_of_rows(self, kind: Bits8 | None) -> PackedLinear | nn.Linear:
        weight, bias = self._rows(self.ids)
        if kind is not None:
            return PackedLinear(weight, bias, kind)
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias, requires_grad=False)
        return layer

    def _rows(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.weight.detach()[ids], None if self.bias is None else self.bias.detach()[ids]

    @torch.no_grad()
    def add_text(self, rows: Sequence[Sequence[int]]) -> None:
        """Take in the last tokens of a text, as far as there is room; those of an earlier text go.

        Rows change in place, so that graphs stay valid.
        """
        given = dict.fromkeys(token for row in rows for token in reversed(row))
        new = [token for token in given if token < self.vocabulary and token not in self.fixed]
        new = new[: len(self.others)]
        taken = set(new)
        room = [*new, *(token for token in self.others if token not in taken)][: len(self.others)]
        if room == self.room:
            return
        first, self.room = len(self.fixed), room
        ids = torch.tensor(room, device=self.ids.device)
        weight, bias = self._rows(ids)
        self.ids[first:] = ids
        if isinstance(self.layer, PackedLinear):
            self.layer.set_rows(first, weight, bias)
            return
        self.layer.weight[first:] = weight
        if bias is not None:
            self.layer.bias[first:] = bias

    def expand(self, logits: Tensor) -> Tensor:
        """Return logits [..., V] over the vocabulary, given those over the shortlist [..., S]."""
        full = logits.new_full((*logits.shape[:-1], self.vocabulary), FILLER)
        return full.index_copy_(-1, self.ids, logits)


def read_tokens(path: str | Path) -> list[int]:
    """Read the tokens of a shortlist: a JSON list of ids, as `hf-specbranch shortlist` writes it.

    Raises:
        ValueError: if there is no such file, or it holds something else.
    """
    try:
        tokens = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ValueError(f"draft_shortlist={str(path)!r}: there is no such file") from None
    except ValueError as error:
        raise ValueError(f"draft_shortlist={str(path)!r}: {error}") from error
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int and token >= 0 for token in tokens):
        raise ValueError(f"draft_shortlist={str(path)!r}: expected a list of token ids")
    return tokens


def most_frequent(texts: Iterable[Sequence[int]], size: int) -> list[int]:
    """Return the `size` tokens that appear most often in texts, given as token ids; the most frequent first.

    Example:
        >>> most_frequent([[1, 2, 2], [2, 3, 3]], size=2)
        [2, 3]
    """
    from collections import Counter

    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text)
    return [token for token, _ in counts.most_common(size)]
