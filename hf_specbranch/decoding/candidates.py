"""A user's `CandidateGenerator` as a draft source: transformers' interface, on the host, for each row of a batch.

What it returns is checked before it is used, so a faulty generator ends a call with an error and never changes a text.
Candidates without logits are compared with the target's choices. Candidates with logits are tested against
`q = softmax(logits)`, from which they must have been drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import CandidateGenerator

from ..config import BLOCK_SIZE, SpecBranchConfig
from ..runtime.static_buffers import Buffers
from .lookup import lengths_up_to
from .resolve import NONE, BranchStarts, DraftTokens, Feedback
from .scoring import Prefixes
from .verifier import Verifier

MOST = BLOCK_SIZE - 1  # candidates that a generator is asked for; with the token before them a block


class Candidates(NamedTuple):
    """What a generator has proposed for one row."""

    tokens: list[int]
    q: Tensor | None  # [n, V] the distributions that the tokens were drawn from


class Asked(NamedTuple):
    """The candidates of one row that are verified in a round."""

    sent: list[int]
    length: int  # of the text that the generator was given
    columns: int  # the same with the padding, which processors see


def check_generator(generator: CandidateGenerator) -> None:
    """Refuse a generator that needs more than the tokens of the text."""
    if generator.requires_model_outputs:
        raise ValueError(
            f"{type(generator).__name__} requires the target's outputs (requires_model_outputs), which are not kept: "
            f"use a CandidateGenerator that reads input_ids alone"
        )


def settings_for_candidates(config: SpecBranchConfig, generator: CandidateGenerator) -> SpecBranchConfig:
    """Return the settings of a call in which a generator drafts: it drafts, then the target verifies."""
    check_generator(generator)
    if config.policy in ("pearl", "specbranch"):
        raise ValueError(
            f"policy={config.policy!r} drafts while the target verifies, which a CandidateGenerator cannot do: choose "
            f'"auto" or "vanilla"'
        )
    longest = MOST if config.max_draft_length == "auto" else config.max_draft_length
    policy = "vanilla" if config.policy == "auto" else config.policy
    return replace(config, policy=policy, max_draft_length=longest, prompt_lookup_num_tokens=0)


def checked_candidates(name: str, returned: Any, text: list[int], vocabulary: int) -> Candidates:
    """Return the tokens after the text that a generator has returned; raise an error for anything it may not return.

    Args:
        name: names the generator in errors.
        returned: what `get_candidates` has returned.
        text: the tokens that it was given.
        vocabulary: how many tokens the target scores.

    Example:
        >>> checked_candidates("Mine", (torch.tensor([[5, 6, 7]]), None), [5, 6], vocabulary=8).tokens
        [7]
    """
    where = f"{name}.get_candidates"
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise ValueError(f"{where} returned {_described(returned)}: expected (candidate_input_ids, candidate_logits)")
    ids, logits = returned
    integers = isinstance(ids, Tensor) and not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if not integers or ids.ndim != 2 or ids.shape[0] != 1:
        raise ValueError(
            f"{where} returned {_described(ids)}: expected token ids of shape (1, length), as it was given"
        )
    tokens: list[int] = ids[0].tolist()  # the host waits for a generator that works on the device
    if tokens[: len(text)] != text:
        raise ValueError(f"{where} returned ids that do not begin with the {len(text)} tokens that it was given")
    new = tokens[len(text) :]
    if outside := [token for token in new if not 0 <= token < vocabulary]:
        raise ValueError(f"{where} returned token {outside[0]}: the target has tokens 0 to {vocabulary - 1}")
    if logits is None or not new:
        return Candidates(new, None)
    shape = (1, len(new), vocabulary)
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.shape != shape:
        raise ValueError(f"{where} returned {_described(logits)} as logits of {len(new)} tokens: expected {shape}")
    q = logits[0].float().softmax(-1)
    if not bool((q[range(len(new)), new] > 0).all()):  # also where it is NaN
        raise ValueError(f"{where} returned a token whose probability under its own logits is 0, or not a number")
    return Candidates(new, q)


def _described(given: Any) -> str:
    return f"{given.dtype} of shape {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)[:80]


class CandidateDraft:
    """The draft source that asks a generator. See `DraftSource`.

    Args:
        generator: the user's.
        buffers: where the tokens are kept; those of the text.
        verifier: verifies them; its scores are passed on to the generator.
        attention: [B, P] bool, False where the prompt is padded.
        most: the most tokens to take.
        vocabulary: how many tokens the target scores.
        draws: candidates with logits are tested against these; otherwise they are compared with the target's choices.

    Attributes:
        lengths: the numbers of draft tokens that are sent, padding included.
        forced: send so many tokens without asking; for a warm-up.
    """

    depth, same_every_round, keeps_drafts, reads_early = 0, False, False, False
    begin_next = None

    def __init__(
        self,
        generator: CandidateGenerator,
        buffers: Buffers,
        verifier: Verifier,
        attention: Tensor,
        most: int,
        vocabulary: int,
        draws: bool,
    ) -> None:
        self.generator, self.buffers, self.verifier, self.text = generator, buffers, verifier, verifier.text
        self.vocabulary, self.draws, self.most = vocabulary, draws, most
        self.name, self.device = type(generator).__name__, self.text.ids.device
        self.lengths = (most,) if buffers.static_shapes else lengths_up_to(most)
        self.forced: int | None = None
        self.attention = attention
        self.prompts: list[list[int]] = []
        rows = self.text.ids.shape[0]
        self.sent = buffers.tensor("candidates.sent", (rows,))
        absent = buffers.tensor("candidates.at", (rows, 1)).fill_(NONE)  # the test of drawn tokens takes one branch
        self.no_branch = BranchStarts(buffers.tensor("candidates.branch", (rows, 1)), absent)
        self.asked: dict[int, Asked] = {}  # by row
        learns = type(generator).update_candidate_strategy is not CandidateGenerator.update_candidate_strategy
        self.learns = learns or "update_candidate_strategy" in vars(generator)

    def prefill(self, length: int) -> None:
        rows = self.text.ids[:, : self.text.prompt_length].tolist()
        self.prompts = [
            [token for token, real in zip(row, mask) if real] for row, mask in zip(rows, self.attention.tolist())
        ]

    def remember(self, tokens: list[int]) -> None:
        self._report()

    def propose(self, feedback: Feedback, reached: int) -> DraftTokens:
        if self.forced is not None:
            return self._draft_tokens([Candidates([0] * self.forced, None)] * len(self.text.lengths))
        self._report()
        return self._draft_tokens([self._ask(row) for row in range(len(self.text.lengths))])

    def branch(self, reached: int) -> BranchStarts:
        return self.no_branch

    def drafted(self) -> Tensor:
        none = torch.zeros_like(self.sent)
        return torch.stack([self.sent, none, none, none, none, self.sent], dim=1)

    # ---- calls of the generator

    def _ask(self, row: int) -> Candidates:
        if self.text.done[row]:
            return Candidates([], None)
        tokens, found = self.prompts[row] + self.text.new[row], Candidates([], None)
        count = min(self.text.stopper.max_length - self.text.lengths[row] - 1, self.most)
        if count > 0:
            returned = self.generator.get_candidates(self._on_device(tokens))
            found = checked_candidates(self.name, returned, tokens, self.vocabulary)
        sent = found.tokens[:count]
        self.asked[row] = Asked(sent, len(tokens), self.text.lengths[row])
        return Candidates(sent, None if found.q is None or not self.draws else found.q[:count].to(self.device))

    def _report(self) -> None:
        """Tell the generator what became of its last candidates."""
        asked, self.asked = self.asked, {}
        if not asked or not self.learns:
            return
        scores = self._scores(asked)
        for row, each in asked.items():
            tokens = self.prompts[row] + self.text.new[row]
            matches, own = len(tokens) - each.length - 1, scores[row : row + 1, : len(each.sent) + 1].clone()
            self.generator.update_candidate_strategy(self._on_device(tokens), own, matches)

    def _scores(self, asked: dict[int, Asked]) -> Tensor:
        """[B, N + 1, V] the target's scores at the candidates of each row and after them."""
        if not self.buffers.static_shapes:
            assert self.verifier.scores is not None
            return self.verifier.scores
        logits = self.verifier.logits.to(self.device, torch.float32)
        ids, before = self.text.ids.clone(), [1] * self.text.ids.shape[0]
        for row, each in asked.items():  # the text has its own tokens in place of rejected ones
            before[row] = each.columns
            ids[row, each.columns : each.columns + len(each.sent)] = torch.tensor(each.sent, device=self.device)
        columns = torch.arange(logits.shape[1], device=self.device)
        lengths = torch.tensor(before, device=self.device)[:, None] + columns
        return self.verifier.score(logits, lambda: Prefixes(ids[:, None].expand(-1, len(columns), -1), lengths))

    def _on_device(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([tokens], device=self.device)  # a new tensor: a generator may write to it

    # ---- what is sent

    def _draft_tokens(self, rows: list[Candidates]) -> DraftTokens:
        rows = rows + [Candidates([], None)] * (self.sent.shape[0] - len(rows))  # padding rows
        longest = max(len(each.tokens) for each in rows)
        self.sent.copy_(torch.tensor([len(each.tokens) for each in rows]))
        if not longest:
            return self.verifier.nothing[0]
        static = self.buffers.static_shapes
        width = next(length for length in self.lengths if length >= longest) if static else longest
        tokens = self.buffers.tensor(f"candidates.tokens{width}", (len(rows), width))
        tokens.copy_(torch.tensor([each.tokens + [0] * (width - len(each.tokens)) for each in rows]))
        q = None
        if self.draws and (static or any(each.q is not None for each in rows)):
            q = self.buffers.tensor(f"candidates.q{width}", (*tokens.shape, self.vocabulary), torch.float32)
            for row, each in enumerate(rows):
                if each.q is not None:
                    q[row, : len(each.tokens)] = each.q
                else:  # without logits a token is certain to be proposed
                    q[row, range(len(each.tokens)), each.tokens] = 1.0
        return DraftTokens(tokens, self.sent, q, memory=self.buffers.serial if static else -1)
