"""The verifier: from the target's logits to a verify result.

It applies the logits processors, then accepts draft tokens in one of two ways (`acceptance.py`):

- `accept_choices`, where drafts are greedy: choose the target's token at each position (`argmax p`, or a draw from
  `p`), and accept draft tokens for as long as they are what was chosen.
- `accept_samples`, where drafts are drawn from `q`: accept each with probability `min(1, p / q)`, else draw from the
  residual.

`Verifier.accept` calls them. In Triton, `kernels/rounds/draws.py` makes the choices (drawn drafts are tested there),
and `kernels/rounds/verify.py` follows the draft; `Verifier._verify_in_triton` calls both. Processors that must be
called token by token are served by `_choose_in_order`, which follows the draft as it chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels.parallel_build import room as index_memory
from ..kernels.rounds import Drawn, drawn_choices, likeliest, verify_draft
from ..runtime.base import Step
from ..runtime.static_buffers import Buffers, HostCopies
from .acceptance import (
    Acceptance,
    LeafContinuation,
    accept_choices,
    accept_samples,
    continue_leaf,
    draw_if_possible,
)
from .resolve import NONE, RESULT_NUMBERS, BranchStarts, DraftTokens, VerifyResult
from .scoring import ExactScorer, Prefixes, Processor, Scorer, StaticScorer, is_opaque
from .target_states import TargetStates
from .text import ScoresSoFar, Text

UNDECIDED = -1


class Verifier:
    """Verifies draft tokens and branches against the target's distribution `p`.

    Args:
        buffers: the memory of the verify stage; with static shapes the stage is captured as a CUDA graph.
        text: the committed text.
        processors: the user's logits processors.
        vocabulary: how many tokens the target scores.
        samples: draw from `p`; otherwise take its maximum.
        generator: source of randomness.
        feature_layers: indices of the target's layers whose hidden states the hooks read.
        scores_so_far: returns the scores that stopping criteria are given; see `outputs.Recorder`.
        in_triton: verify in Triton, which also updates the text and its round result on the device.
    """

    def __init__(
        self,
        buffers: Buffers,
        text: Text,
        processors: Sequence[Processor],
        vocabulary: int,
        samples: bool,
        generator: torch.Generator | None,
        feature_layers: tuple[int, ...] = (),
        scores_so_far: Callable[[Tensor], ScoresSoFar | None] | None = None,
        in_triton: bool = False,
    ) -> None:
        self.buffers, self.text, self.processors, self.samples = buffers, text, processors, samples
        self.generator, self.feature_layers, self.scores_so_far = generator, feature_layers, scores_so_far
        self.in_order = any(is_opaque(processor) for processor in processors)
        self.in_triton = in_triton
        rows = text.ids.shape[0]
        if in_triton:
            self.limit = buffers.tensor("verifier.limit", (rows,)).fill_(text.stopper.max_length)
            self.limit[len(text.lengths) :] = text.prompt_length  # padding rows gain nothing
            text.resolved_on_device = True
        self.scorer: Scorer | None = None
        if processors:
            if buffers.static_shapes:
                self.scorer = StaticScorer(processors, buffers, "verifier", rows, vocabulary)
            else:
                self.scorer = ExactScorer(processors, text.ids.device)
        self.host_copies = HostCopies(text.ids.device)
        branches = (rows, int(in_triton))  # the kernel takes at least one, which does not exist
        self.nothing = (  # no draft tokens and no branches: for the prompt, and for methods that never draft
            DraftTokens(buffers.tensor("nothing.tokens", (rows, 0)), buffers.tensor("nothing.length", (rows,))),
            BranchStarts(
                buffers.tensor("nothing.branches", branches), buffers.tensor("nothing.at", branches).fill_(NONE)
            ),
        )
        self.result_memory: dict[int, Tensor] = {}  # by the number of draft tokens
        self.feature_memory: Tensor | None = None
        self.features: Tensor | None = None  # [B, layers, H] target hidden states where the last token was chosen
        self.scores: Tensor | None = None  # [B, N + 1, V] of the last round; None in Triton
        self.logits = torch.empty(0)  # [B, N + 1 + W, V] of the last round, from the target
        self.states: TargetStates | None = None  # keeps the target's hidden states, if a head drafts

    def verify(
        self, step: Step, draft_tokens: DraftTokens, branches: BranchStarts, drafted: Callable[[], Tensor]
    ) -> None:
        """Verify a round on the device: append the accepted tokens to the text, and send the result to the host.

        Args:
            step: logits [B, N + 1 + W, V] from the target: N draft tokens, the branch point, W tree leaves.
            draft_tokens: what the target verified.
            branches: the branches drafted meanwhile.
            drafted: returns the counts [B, 6] of what is drafted; the fields of `Drafted`.
        """
        rows, count = draft_tokens.tokens.shape
        if draft_tokens.leaves is not None and not draft_tokens.leaves.tokens.shape[1]:  # only a token was read again
            draft_tokens = draft_tokens._replace(leaves=None)
        if count not in self.result_memory:
            self.result_memory[count] = self.buffers.tensor(f"result{count}", (rows, RESULT_NUMBERS + count))
        packed, queries, self.logits = self.result_memory[count], step.logits.shape[1], step.logits
        self.features = self._memory_for_features(step)
        verify = self._verify_in_triton if self.in_triton else self._verify_in_torch
        states = None if self.states is None or not step.is_aligned else self.states

        def stage() -> None:
            length = None if states is None else self.text.length.clone()  # the kernel advances it
            last_query = verify(step.logits, draft_tokens, branches, drafted(), packed)
            if states is not None and length is not None:
                states.record(step, length, packed[:, 0], last_query, count)
            if self.features is not None:
                self.features.copy_(features_at(step, last_query, self.feature_layers))

        memory = draft_tokens.memory, step.logits.data_ptr(), None if states is None else states.serial
        key = ("verify", count, queries, branches.tokens.shape[1], self.features is None, *memory)
        self.buffers.run(key, stage, only_our_kernels=self.in_triton and states is None)
        self.host_copies.send(packed)

    def results(self) -> list[VerifyResult]:
        """Wait for the oldest round in flight; return one result per row. The host waits once per round, here."""
        return [VerifyResult.unpack(numbers) for numbers in self.host_copies.read()[: len(self.text.lengths)]]

    # ---- the verify stage, in torch and in Triton

    def _verify_in_torch(
        self, logits: Tensor, draft_tokens: DraftTokens, branches: BranchStarts, drafted: Tensor, packed: Tensor
    ) -> Tensor:
        """Verify, write the accepted tokens to the text, and pack the result for the host.

        Returns:
            [B] the query whose logits the last token was chosen from.
        """
        count = draft_tokens.tokens.shape[1]
        acceptance, self.scores = self.accept(logits[:, : count + 1], draft_tokens, branches)
        continuation = self.continue_leaves(acceptance, logits[:, count + 1 :], draft_tokens)
        survivor = self._survivor_after_leaf(acceptance.survivor, continuation.token, branches)
        self.text.offer(acceptance, continuation.token, draft_tokens)
        result = torch.stack([acceptance.accepted, acceptance.token, survivor, continuation.token], dim=1)
        packed.copy_(torch.cat([result, drafted.to(packed.device), draft_tokens.tokens.to(packed.device)], dim=1))
        return torch.where(continuation.leaf == NONE, acceptance.accepted, count + 1 + continuation.leaf)

    def _verify_in_triton(
        self, logits: Tensor, draft_tokens: DraftTokens, branches: BranchStarts, drafted: Tensor, packed: Tensor
    ) -> Tensor:
        """The same in one kernel, once the target's choices are known; it also writes the round result."""
        last_query = index_memory(draft_tokens.length.shape, torch.long, logits.device)
        leaves = None if draft_tokens.leaves is None else (draft_tokens.leaves.tokens, draft_tokens.leaves.at)
        choices = self._all_choices(logits, draft_tokens, branches)
        verify_draft(
            choices, (draft_tokens.tokens, draft_tokens.length), (branches.tokens, branches.at), branches.following,
            leaves, drafted, self.text.ids, self.text.result.packed, self.limit, packed, last_query,
        )  # fmt: skip
        return last_query

    # ---- in torch

    def accept(self, logits: Tensor, draft_tokens: DraftTokens, branches: BranchStarts) -> tuple[Acceptance, Tensor]:
        """Return the accepted count, the target's own token and the surviving branch; and the processed scores.

        Args:
            logits: [B, N + 1, V] from the target.
            draft_tokens: what it verified.
            branches: the branches drafted meanwhile.
        """
        device = self.text.ids.device
        logits = logits.to(device=device, dtype=torch.float32)
        draft_tokens, branches = draft_tokens.to(device), branches.to(device)
        if self.in_order:
            choices, scores = self._choose_in_order(logits, draft_tokens)
        else:
            scores = self.score(logits, lambda: self.text.prefixes(draft_tokens))
            if draft_tokens.q is not None:
                return self._rejection_sample(scores, draft_tokens, branches), scores
            choices = self._choose(scores)
        return accept_choices(choices, draft_tokens.tokens, draft_tokens.length, branches.tokens, branches.at), scores

    def continue_leaves(self, acceptance: Acceptance, logits: Tensor, draft_tokens: DraftTokens) -> LeafContinuation:
        """Return the target's next token after its own, if its own token is one of the tree leaves.

        Args:
            acceptance: the accepted count, the target's own token, the surviving branch.
            logits: [B, W, V] after the leaves.
            draft_tokens: what the target verified.
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

    def score(self, logits: Tensor, prefixes: Callable[[], Prefixes]) -> Tensor:
        """Apply the processors to logits [B, n, V] at many positions."""
        return logits if self.scorer is None else self.scorer(logits, prefixes)

    def score_columns(self, logits: Tensor, first: int) -> Tensor:
        """Return the processed scores [B, Q, V] after committed columns, from column `first` on."""
        ids = self.text.ids[:, None].expand(-1, logits.shape[1], -1)
        lengths = (first + 1 + self.text.columns[: logits.shape[1]]).expand(logits.shape[0], -1)
        logits = logits.to(device=ids.device, dtype=torch.float32)
        return self.score(logits, lambda: Prefixes(ids, lengths))

    def _survivor_after_leaf(self, survivor: Tensor, continuation: Tensor, branches: BranchStarts) -> Tensor:
        """[B] the surviving branch; NONE if its second token is not the leaf continuation."""
        if branches.following is None:
            return survivor
        following = branches.following.to(survivor.device).gather(1, survivor.clamp(min=0)[:, None])[:, 0]
        return torch.where((continuation == NONE) | (continuation == following), survivor, NONE)

    def _rejection_sample(self, scores: Tensor, draft_tokens: DraftTokens, branches: BranchStarts) -> Acceptance:
        """Accept each drawn token with probability `min(1, p / q)`, else draw from the residual."""
        assert draft_tokens.q is not None
        at_branch_point = scores.new_zeros((scores.shape[0], 1, scores.shape[2]))
        q = torch.cat([draft_tokens.q, at_branch_point], dim=1)  # [B, N + 1, V]
        if branches.q is not None:
            rows = torch.arange(q.shape[0], device=q.device)
            q[rows, draft_tokens.length] = branches.q
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
        """Return the target's token at each position: [..., V] to [...]."""
        return draw_if_possible(scores.softmax(-1), self.generator) if self.samples else scores.argmax(-1)

    def _choose_in_order(self, logits: Tensor, draft_tokens: DraftTokens) -> tuple[Tensor, Tensor]:
        """Call processors, choose, call stopping criteria, one token after the other, as plain `generate()` does.

        Each token becomes text before the next one is chosen. When an unfinished row disagrees with its draft, all rows
        stop there: they advance in step, so that a processor sees one rectangular batch.
        """
        rows, positions, _ = logits.shape
        choices = torch.full((rows, positions), UNDECIDED, device=logits.device)
        scores = logits.clone()
        shown = None if self.scores_so_far is None else self.scores_so_far(scores)
        lengths, drafted = draft_tokens.length.tolist(), draft_tokens.tokens.tolist()
        for j in range(positions):
            text, column = self.text.so_far(), logits[:, j].clone()
            for processor in self.processors:
                column = processor(text, column)
            scores[:, j] = column
            choices[:, j] = self._choose(column)
            tokens = choices[:, j].tolist()
            agreed = [j < length and row[j] == token for length, row, token in zip(lengths, drafted, tokens)]
            if not self.text.append(tokens, agreed, shown):
                break
        return choices, scores

    # ---- in Triton

    def _all_choices(self, logits: Tensor, draft_tokens: DraftTokens, branches: BranchStarts) -> Tensor:
        """[B, N + 1 + W]: the token decided at each draft position, at the branch point, and after each leaf."""
        scores = self.score(logits.float(), lambda: self._all_prefixes(draft_tokens)) if self.processors else logits
        if not self.samples:
            return likeliest(scores)
        shape = (*scores.shape[:2], scores.shape[2] + 1)  # the last number decides whether a drawn token is accepted
        noise = torch.empty(shape, device=scores.device).exponential_(generator=self.generator)
        if draft_tokens.q is None:
            return drawn_choices(scores, noise, None)
        drafted = draft_tokens.tokens, draft_tokens.length, draft_tokens.q
        drawn = Drawn(*drafted, branches.tokens, branches.at, branches.q)
        return drawn_choices(scores, noise, drawn)

    def _all_prefixes(self, draft_tokens: DraftTokens) -> Prefixes:
        """Return the text before each query of `_all_choices`."""
        before = self.text.prefixes(draft_tokens)
        if draft_tokens.leaves is None:
            return before
        after = self.text.leaf_prefixes(draft_tokens)
        return Prefixes(*(torch.cat(both, dim=1) for both in zip(before, after)))

    def _memory_for_features(self, step: Step) -> Tensor | None:
        if not self.feature_layers or step.hidden_states is None or not step.is_aligned:
            return None
        if self.feature_memory is None:
            like = step.hidden_states[self.feature_layers[0]]  # [B, Q, H]
            shape = (like.shape[0], len(self.feature_layers), like.shape[2])
            self.feature_memory = self.buffers.tensor("features", shape, like.dtype)
        return self.feature_memory


def features_at(step: Step, query: Tensor, layers: tuple[int, ...]) -> Tensor:
    """[B, layers, H]: the target's hidden states at the query [B] whose logits the last token was chosen from."""
    assert step.hidden_states is not None
    states = []
    for layer in layers:  # a split model has its layers on several devices
        state = step.hidden_states[layer]
        rows = torch.arange(query.shape[0], device=state.device)
        states.append(state[rows, query.to(state.device)].to(query.device))
    return torch.stack(states, dim=1)
