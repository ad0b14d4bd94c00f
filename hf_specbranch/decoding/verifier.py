"""From the target's logits to a verdict: processors, then the choice or the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..runtime.base import Step
from ..runtime.host_copies import HostCopies
from ..runtime.static_buffers import Buffers
from .acceptance import (
    NONE,
    Acceptance,
    LeafContinuation,
    accept_choices,
    accept_samples,
    continue_leaf,
    draw_if_possible,
)
from .scoring import ExactScorer, Prefixes, Processor, Scorer, is_opaque
from .state import Branches, DraftTokens, VerifyResult
from .static_scoring import StaticScorer
from .text import ScoresSoFar, Text

UNDECIDED = -1


class Verifier:
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

    only_our_kernels = False  # see `Buffers.run`

    def __init__(
        self,
        buffers: Buffers,
        text: Text,
        processors: Sequence[Processor],
        vocabulary: int,
        draws: bool,
        generator: torch.Generator | None,
        feature_layers: tuple[int, ...] = (),
        scores_so_far: Callable[[Tensor], ScoresSoFar | None] = lambda scores: None,
    ) -> None:
        self.buffers, self.text, self.processors, self.draws, self.generator = (
            buffers,
            text,
            processors,
            draws,
            generator,
        )
        self.feature_layers, self.scores_so_far = feature_layers, scores_so_far
        self.in_order = any(is_opaque(processor) for processor in processors)
        self.score: Scorer = ExactScorer(processors)
        if buffers.static_shapes:
            self.score = StaticScorer(processors, buffers, "verifier", vocabulary)
        self.host_copies = HostCopies(text.ids.device)
        rows = text.ids.shape[0]
        self.nothing = (  # for the round after the prompt, and for those who never draft
            DraftTokens(buffers.tensor("nothing.tokens", (rows, 0)), buffers.tensor("nothing.length", (rows,))),
            Branches(
                buffers.tensor("nothing.branches", (rows, 1)), buffers.tensor("nothing.at", (rows, 1)).fill_(NONE)
            ),
        )
        self.result_memory: dict[int, Tensor] = {}
        self.feature_memory: Tensor | None = None
        self.features: Tensor | None = None  # [B, layers, H] target hidden states at the last verified position
        self.scores: Tensor | None = None  # [B, N + 1, V] of the last verdict; only where the stage is not captured

    def __call__(
        self, step: Step, draft_tokens: DraftTokens, branches: Branches, drafted: Callable[[], Tensor]
    ) -> None:
        """Reach a verdict, add what it allows to the text, and send a report to the host.

        Args:
            step: logits [B, N + 1 + W, V] from the target, and its hidden states.
            drafted: says what stands drafted, [B, 6]; see `VerifyResult`.
        """
        rows, count = draft_tokens.tokens.shape
        if count not in self.result_memory:
            self.result_memory[count] = self.buffers.tensor(
                f"report{count}", (rows, len(VerifyResult._fields) - 1 + count)
            )
        verify_result = self.result_memory[count]
        self.features = self._room_for_features(step)

        def stage() -> None:
            where = self._decide(step.logits, draft_tokens, branches, drafted(), verify_result)
            if self.features is not None:
                self.features.copy_(features_at(step, where, self.feature_layers))

        key = (
            "verifier",
            count,
            step.logits.shape[1],
            branches.tokens.shape[1],
            self.features is None,
            draft_tokens.memory,
        )
        self.buffers.run(key, stage, self.only_our_kernels)
        self.host_copies.send(verify_result)

    def _decide(
        self, logits: Tensor, draft_tokens: DraftTokens, branches: Branches, drafted: Tensor, verify_result: Tensor
    ) -> Tensor:
        """Judge, offer the text what is allowed, and write the report.

        Returns:
            [B] which query's logits the last token was chosen from.
        """
        count = draft_tokens.tokens.shape[1]
        acceptance, self.scores = self.acceptance(logits[:, : count + 1], draft_tokens, branches)
        continuation = self.continue_leaves(acceptance, logits[:, count + 1 :], draft_tokens)
        survivor = self._goes_on(acceptance.survivor, continuation.token, branches)
        self.text.offer(acceptance, continuation.token, draft_tokens)
        said = torch.stack([acceptance.accepted, acceptance.token, survivor, continuation.token], dim=1)
        verify_result.copy_(
            torch.cat([said, drafted.to(verify_result.device), draft_tokens.tokens.to(verify_result.device)], dim=1)
        )
        return torch.where(continuation.leaf == NONE, acceptance.accepted, count + 1 + continuation.leaf)

    def results(self) -> list[VerifyResult]:
        """One a row; here the host waits for the device, once a round."""
        return [VerifyResult.of(numbers) for numbers in self.host_copies.read()]

    def continue_leaves(self, acceptance: Acceptance, logits: Tensor, draft_tokens: DraftTokens) -> LeafContinuation:
        """The token behind the verdict's, where the target has checked that one as a runner-up.

        Args:
            logits: [B, W, V] behind the runners-up.
        """
        if draft_tokens.leaves is None:
            none = torch.full_like(acceptance.token, NONE)
            return LeafContinuation(none, none)
        device = self.text.ids.device
        draft_tokens = draft_tokens.to(device)
        assert draft_tokens.leaves is not None
        logits = logits.to(device=device, dtype=torch.float32)
        choices = self._choose(self.score(logits, lambda: self.text.leaf_prefixes(draft_tokens)))
        return continue_leaf(acceptance, choices, draft_tokens.leaves.tokens, draft_tokens.leaves.at)

    def _goes_on(self, survivor: Tensor, continuation: Tensor, branches: Branches) -> Tensor:
        """[B] the surviving branch, unless the bonus token behind its first is not its next."""
        if branches.following is None:
            return survivor
        following = branches.following.to(survivor.device).gather(1, survivor.clamp(min=0)[:, None])[:, 0]
        return torch.where((continuation == NONE) | (continuation == following), survivor, NONE)

    def acceptance(self, logits: Tensor, draft_tokens: DraftTokens, branches: Branches) -> tuple[Acceptance, Tensor]:
        """The verdict and the processed scores [B, N + 1, V].

        Args:
            logits: [B, N + 1, V] from the target.
        """
        device = self.text.ids.device
        logits = logits.to(device=device, dtype=torch.float32)
        draft_tokens, branches = draft_tokens.to(device), branches.to(device)
        if self.in_order:
            choices, scores = self._choose_in_order(logits, draft_tokens)
        else:
            scores = self.score(logits, lambda: self.text.prefixes(draft_tokens))
            if draft_tokens.scores is not None:
                return self._test(scores, draft_tokens, branches), scores
            choices = self._choose(scores)
        return accept_choices(choices, draft_tokens.tokens, draft_tokens.length, branches.tokens, branches.at), scores

    def score_columns(self, logits: Tensor, first: int) -> Tensor:
        """The processed scores [B, Q, V] after columns `first` onward of text that is final."""
        ids = self.text.ids[:, None].expand(-1, logits.shape[1], -1)
        lengths = (first + 1 + self.text.columns[: logits.shape[1]]).expand(logits.shape[0], -1)
        logits = logits.to(device=ids.device, dtype=torch.float32)
        return self.score(logits, lambda: Prefixes(ids, lengths))

    def _test(self, scores: Tensor, draft_tokens: DraftTokens, branches: Branches) -> Acceptance:
        assert draft_tokens.scores is not None
        at_point = scores.new_zeros((scores.shape[0], 1, scores.shape[2]))
        q = torch.cat([draft_tokens.scores, at_point], dim=1)  # [B, N + 1, V]
        if branches.scores is not None:
            rows = torch.arange(q.shape[0], device=q.device)
            q[rows, draft_tokens.length] = branches.scores
        return accept_samples(
            scores.softmax(-1),
            q,
            draft_tokens.tokens,
            draft_tokens.length,
            branches.tokens,
            branches.at,
            self.generator,
        )

    def _choose(self, scores: Tensor) -> Tensor:
        """The target's token at each position: [..., V] to [...]."""
        return draw_if_possible(scores.softmax(-1), self.generator) if self.draws else scores.argmax(-1)

    def _choose_in_order(self, logits: Tensor, draft_tokens: DraftTokens) -> tuple[Tensor, Tensor]:
        """Processors, choice, stopping criteria, one token after the other: just the calls of plain `generate()`.

        Each token becomes text before anybody is asked about the next. As soon as one unfinished row leaves its chain,
        the rest is undecided for all of them: rows advance in step, so that a processor sees one rectangular batch.
        """
        rows, positions, _ = logits.shape
        choices = torch.full((rows, positions), UNDECIDED, device=logits.device)
        scores = logits.clone()
        shown = self.scores_so_far(scores)
        lengths, drafted = draft_tokens.length.tolist(), draft_tokens.tokens.tolist()
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
            memory = self.buffers.tensor("features", shape, like.dtype)
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
