"""From the target's logits to a verdict: processors, then the choice or the test."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .records import Branches, Chain
from .scoring import Processor, is_opaque, needs_prefixes, score_positions
from .text import Text
from .verify import Verdict, judge_choices, judge_samples

UNDECIDED = -1


class Judge:
    """Judges chains and branches by the target's distribution `p`.

    Args:
        text: the committed text.
        processors: the user's logits processors.
        draws: sample from `p`; otherwise take its maximum.
        generator: source of randomness for the verdicts.
    """

    def __init__(
        self, text: Text, processors: Sequence[Processor], draws: bool, generator: torch.Generator | None
    ) -> None:
        self.text, self.processors, self.draws, self.generator = text, list(processors), draws, generator
        self.in_order = any(is_opaque(processor) for processor in processors)

    def __call__(self, logits: Tensor, chain: Chain, branches: Branches) -> tuple[Verdict, Tensor]:
        """The verdict and the processed scores [B, N + 1, V].

        Args:
            logits: [B, N + 1, V] from the target.
        """
        device = self.text.ids.device
        logits = logits.to(device=device, dtype=torch.float32)
        chain, branches = chain.to(device), branches.to(device)
        if self.in_order:
            choices, scores = self._choose_in_order(logits, chain)
        else:
            scores = self._score(logits, chain)
            if chain.scores is not None:
                return self._test(scores, chain, branches), scores
            choices = self._choose(scores)
        return judge_choices(choices, chain.tokens, chain.length, branches.tokens, branches.width), scores

    def _test(self, scores: Tensor, chain: Chain, branches: Branches) -> Verdict:
        assert chain.scores is not None
        at_point = scores.new_zeros((scores.shape[0], 1, scores.shape[2]))
        q = torch.cat([chain.scores, at_point], dim=1)  # [B, N + 1, V]
        if branches.scores is not None:
            rows = torch.arange(q.shape[0], device=q.device)
            q[rows, chain.length] = branches.scores
        return judge_samples(
            scores.softmax(-1), q, chain.tokens, chain.length, branches.tokens, branches.width, self.generator
        )

    def _score(self, logits: Tensor, chain: Chain) -> Tensor:
        prefixes = self.text.prefixes(chain) if needs_prefixes(self.processors) else []
        return score_positions(self.processors, prefixes, logits)

    def _choose(self, scores: Tensor) -> Tensor:
        """The target's token at each position: [..., V] to [...]."""
        if not self.draws:
            return scores.argmax(-1)
        p = scores.softmax(-1)
        drawn = torch.multinomial(p.reshape(-1, p.shape[-1]), 1, generator=self.generator)
        return drawn.view(scores.shape[:-1])

    def _choose_in_order(self, logits: Tensor, chain: Chain) -> tuple[Tensor, Tensor]:
        """Call the processors only for prefixes that have become text, one position after the other.

        As soon as one unfinished row leaves its chain, the rest is undecided for all of them: rows advance in
        step, so that a processor sees one rectangular batch, as in plain `generate()`.
        """
        rows, positions, _ = logits.shape
        choices = torch.full((rows, positions), UNDECIDED, device=logits.device)
        scores = logits.clone()
        lengths = chain.length.tolist()
        running = [b for b in range(rows) if not self.text.done[b]]
        for j in range(positions):
            step = scores[:, j]
            prefix = self.text.step_prefix(chain, j)
            for processor in self.processors:
                step = processor(prefix, step)
            scores[:, j] = step
            choices[:, j] = self._choose(step)
            if j + 1 == positions:
                break
            agreed = (choices[:, j] == chain.tokens[:, j]).tolist()
            if not all(agreed[b] and j < lengths[b] for b in running):
                break
        return choices, scores
