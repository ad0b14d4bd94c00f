"""From the target's logits to a verdict: processors, then the choice or the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..runtime.base import Step
from ..runtime.host_copies import Inbox
from ..runtime.static_buffers import Desk
from .acceptance import NONE, Bonus, Verdict, draw_if_possible, judge_choices, judge_samples, look_up
from .scoring import ExactScorer, Prefixes, Processor, Scorer, is_opaque
from .state import Branches, Chain, Report
from .static_scoring import FixedScorer
from .text import ScoresSoFar, Text

UNDECIDED = -1


class Judge:
    """Judges chains and branches by the target's distribution `p`.

    Args:
        desk: where the stage runs.
        text: the committed text.
        processors: the user's logits processors.
        vocabulary: how many tokens the target scores.
        draws: sample from `p`; otherwise take its maximum.
        generator: source of randomness for the verdicts.
        feature_layers: hidden states of the target that the hooks want to see.
        scores_so_far: what stopping criteria are shown of the scores, see `Recorder`.
    """

    in_kernels = False  # see `Desk.run`

    def __init__(
        self,
        desk: Desk,
        text: Text,
        processors: Sequence[Processor],
        vocabulary: int,
        draws: bool,
        generator: torch.Generator | None,
        feature_layers: tuple[int, ...] = (),
        scores_so_far: Callable[[Tensor], ScoresSoFar | None] = lambda scores: None,
    ) -> None:
        self.desk, self.text, self.processors, self.draws, self.generator = desk, text, processors, draws, generator
        self.feature_layers, self.scores_so_far = feature_layers, scores_so_far
        self.in_order = any(is_opaque(processor) for processor in processors)
        self.score: Scorer = ExactScorer(processors)
        if desk.fixed:
            self.score = FixedScorer(processors, desk, "judge", vocabulary)
        self.inbox = Inbox(text.ids.device)
        rows = text.ids.shape[0]
        self.nothing = (  # for the round after the prompt, and for those who never draft
            Chain(desk.tensor("nothing.tokens", (rows, 0)), desk.tensor("nothing.length", (rows,))),
            Branches(desk.tensor("nothing.branches", (rows, 1)), desk.tensor("nothing.at", (rows, 1)).fill_(NONE)),
        )
        self.report_memory: dict[int, Tensor] = {}
        self.feature_memory: Tensor | None = None
        self.features: Tensor | None = None  # [B, layers, H] target hidden states at the last verified position
        self.scores: Tensor | None = None  # [B, N + 1, V] of the last verdict; only where the stage is not captured

    def __call__(self, step: Step, chain: Chain, branches: Branches, drafted: Callable[[], Tensor]) -> None:
        """Reach a verdict, add what it allows to the text, and send a report to the host.

        Args:
            step: logits [B, N + 1 + W, V] from the target, and its hidden states.
            drafted: says what stands drafted, [B, 6]; see `Report`.
        """
        rows, count = chain.tokens.shape
        if count not in self.report_memory:
            self.report_memory[count] = self.desk.tensor(f"report{count}", (rows, len(Report._fields) - 1 + count))
        report = self.report_memory[count]
        self.features = self._room_for_features(step)

        def stage() -> None:
            where = self._decide(step.logits, chain, branches, drafted(), report)
            if self.features is not None:
                self.features.copy_(features_at(step, where, self.feature_layers))

        key = ("judge", count, step.logits.shape[1], branches.tokens.shape[1], self.features is None, chain.memory)
        self.desk.run(key, stage, self.in_kernels)
        self.inbox.send(report)

    def _decide(self, logits: Tensor, chain: Chain, branches: Branches, drafted: Tensor, report: Tensor) -> Tensor:
        """Judge, offer the text what is allowed, and write the report.

        Returns:
            [B] which query's logits the last token was chosen from.
        """
        count = chain.tokens.shape[1]
        verdict, self.scores = self.verdict(logits[:, : count + 1], chain, branches)
        bonus = self.look_further(verdict, logits[:, count + 1 :], chain)
        survivor = self._goes_on(verdict.survivor, bonus.token, branches)
        self.text.offer(verdict, bonus.token, chain)
        said = torch.stack([verdict.accepted, verdict.token, survivor, bonus.token], dim=1)
        report.copy_(torch.cat([said, drafted.to(report.device), chain.tokens.to(report.device)], dim=1))
        return torch.where(bonus.leaf == NONE, verdict.accepted, count + 1 + bonus.leaf)

    def reports(self) -> list[Report]:
        """One a row; here the host waits for the device, once a round."""
        return [Report.of(numbers) for numbers in self.inbox.read()]

    def look_further(self, verdict: Verdict, logits: Tensor, chain: Chain) -> Bonus:
        """The token behind the verdict's, where the target has checked that one as a runner-up.

        Args:
            logits: [B, W, V] behind the runners-up.
        """
        if chain.leaves is None:
            none = torch.full_like(verdict.token, NONE)
            return Bonus(none, none)
        device = self.text.ids.device
        chain = chain.to(device)
        assert chain.leaves is not None
        logits = logits.to(device=device, dtype=torch.float32)
        choices = self._choose(self.score(logits, lambda: self.text.leaf_prefixes(chain)))
        return look_up(verdict, choices, chain.leaves.tokens, chain.leaves.at)

    def _goes_on(self, survivor: Tensor, bonus: Tensor, branches: Branches) -> Tensor:
        """[B] the surviving branch, unless the bonus token behind its first is not its next."""
        if branches.following is None:
            return survivor
        following = branches.following.to(survivor.device).gather(1, survivor.clamp(min=0)[:, None])[:, 0]
        return torch.where((bonus == NONE) | (bonus == following), survivor, NONE)

    def verdict(self, logits: Tensor, chain: Chain, branches: Branches) -> tuple[Verdict, Tensor]:
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
            scores = self.score(logits, lambda: self.text.prefixes(chain))
            if chain.scores is not None:
                return self._test(scores, chain, branches), scores
            choices = self._choose(scores)
        return judge_choices(choices, chain.tokens, chain.length, branches.tokens, branches.at), scores

    def score_columns(self, logits: Tensor, first: int) -> Tensor:
        """The processed scores [B, Q, V] after columns `first` onward of text that is final."""
        ids = self.text.ids[:, None].expand(-1, logits.shape[1], -1)
        lengths = (first + 1 + self.text.columns[: logits.shape[1]]).expand(logits.shape[0], -1)
        logits = logits.to(device=ids.device, dtype=torch.float32)
        return self.score(logits, lambda: Prefixes(ids, lengths))

    def _test(self, scores: Tensor, chain: Chain, branches: Branches) -> Verdict:
        assert chain.scores is not None
        at_point = scores.new_zeros((scores.shape[0], 1, scores.shape[2]))
        q = torch.cat([chain.scores, at_point], dim=1)  # [B, N + 1, V]
        if branches.scores is not None:
            rows = torch.arange(q.shape[0], device=q.device)
            q[rows, chain.length] = branches.scores
        return judge_samples(
            scores.softmax(-1), q, chain.tokens, chain.length, branches.tokens, branches.at, self.generator
        )

    def _choose(self, scores: Tensor) -> Tensor:
        """The target's token at each position: [..., V] to [...]."""
        return draw_if_possible(scores.softmax(-1), self.generator) if self.draws else scores.argmax(-1)

    def _choose_in_order(self, logits: Tensor, chain: Chain) -> tuple[Tensor, Tensor]:
        """Processors, choice, stopping criteria, one token after the other: just the calls of plain `generate()`.

        Each token becomes text before anybody is asked about the next. As soon as one unfinished row leaves its chain,
        the rest is undecided for all of them: rows advance in step, so that a processor sees one rectangular batch.
        """
        rows, positions, _ = logits.shape
        choices = torch.full((rows, positions), UNDECIDED, device=logits.device)
        scores = logits.clone()
        shown = self.scores_so_far(scores)
        lengths, drafted = chain.length.tolist(), chain.tokens.tolist()
        for j in range(positions):
            text, step = self.text.so_far(), logits[:, j].clone()
            for processor in self.processors:
                step = processor(text, step)
            scores[:, j] = step
            choices[:, j] = self._choose(step)
            tokens = choices[:, j].tolist()
            agreed = [j < length and row[j] == token for length, row, token in zip(lengths, drafted, tokens)]
            if not self.text.append(tokens, agreed, shown):
                break
        return choices, scores

    def _room_for_features(self, step: Step) -> Tensor | None:
        if not self.feature_layers or step.hidden_states is None or not step.is_aligned:
            return None
        if self.feature_memory is None:
            like = step.hidden_states[self.feature_layers[0]]  # [B, Q, H]
            shape = (like.shape[0], len(self.feature_layers), like.shape[2])
            memory = self.desk.tensor("features", shape, like.dtype)
            self.feature_memory = memory
        return self.feature_memory


def features_at(step: Step, accepted: Tensor, layers: tuple[int, ...]) -> Tensor:
    """[B, layers, H]: the target's hidden states where the verdict's last token was chosen."""
    assert step.hidden_states is not None
    states = []
    for layer in layers:  # those of a split model live on several devices
        state = step.hidden_states[layer]
        rows = torch.arange(accepted.shape[0], device=state.device)
        states.append(state[rows, accepted.to(state.device)].to(accepted.device))
    return torch.stack(states, dim=1)
