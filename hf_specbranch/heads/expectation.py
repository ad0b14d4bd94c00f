"""What the target's state makes of drafted tokens: a guess at their probability, learnt from plain text."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

NORMALISED = 0.05  # weight of log Z squared: with Z near 1 a token's score is its log-probability, without a softmax


class Reading(NamedTuple):
    """What the target thought while it read texts, at M positions."""

    hidden: Tensor  # [M, K, H] its last layers where a token was chosen
    tokens: Tensor  # [M, 1 + D] that token, and those that followed
    likely: Tensor  # [M, D, C] the likeliest tokens for each of the places that followed
    chance: Tensor  # [M, D, C] their probabilities
    embeddings: Tensor  # [V, H] the target's input embeddings

    def at(self, rows: Tensor) -> Reading:
        """Some of the positions."""
        return Reading(self.hidden[rows], self.tokens[rows], self.likely[rows], self.chance[rows], self.embeddings)


class Expectation(nn.Module):
    """Scores tokens against a state of the target: how well does this token follow, given those drafted before it?

    Args:
        context_size: width of what describes the target's state.
        embedding_size: of a token.
        tokens: how many drafted tokens are scored.
        query_size: hidden width.
        match_size: width of the space in which states and tokens meet.
    """

    def __init__(self, context_size: int, embedding_size: int, tokens: int, query_size: int, match_size: int) -> None:
        super().__init__()
        self.key = nn.Linear(embedding_size, match_size)
        self.state = nn.Linear(context_size, query_size)
        self.step = nn.ModuleList([nn.Linear(match_size, query_size, bias=False) for _ in range(tokens - 1)])
        self.query = nn.ModuleList([nn.Linear(query_size, match_size + 1) for _ in range(tokens)])

    def queries(self, context: Tensor, keys: Tensor) -> Tensor:
        """[N, D, W + 1] from states [N, C] and the keys [N, D, W] of the drafted tokens; the last entry is a bias."""
        state = self.state(context)
        queries = [self.query[0](state.relu())]
        for place, (step, query) in enumerate(zip(self.step, list(self.query)[1:])):
            state = state + step(keys[:, place])
            queries.append(query(state.relu()))
        return torch.stack(queries, dim=1)

    def forward(self, context: Tensor, drafted: Tensor) -> Tensor:
        """[N, D] scores of the drafted tokens, embeddings [N, D, H], near their log-probability."""
        keys = self.key(drafted)
        queries = self.queries(context, keys)
        scores: Tensor = (queries[..., :-1] * keys).sum(-1) + queries[..., -1]
        return scores

    def loss(self, context: Tensor, reading: Reading, table: Tensor) -> Tensor:
        """Cross-entropy with the target's own distributions, over the whole vocabulary (embeddings [V, H])."""
        keys = self.key(table)  # [V, W]
        queries = self.queries(context, keys[reading.tokens[:, 1:]])
        logits = queries[..., :-1] @ keys.T + queries[..., -1:]  # [M, D, V]
        log_z = logits.logsumexp(-1)
        said = (reading.chance * (logits.gather(2, reading.likely) - log_z[..., None])).sum(-1)
        loss: Tensor = NORMALISED * log_z.square().mean() - said.mean()
        return loss


def learn_expectation(
    expectation: Expectation,
    context: Tensor,
    reading: Reading,
    table: Tensor,
    epochs: int,
    dropout: float,
    seed: int,
    progress: bool,
) -> list[float]:
    """Fit it to a reading; the loss of each epoch.

    Args:
        expectation: to be fitted, on the device of the tensors.
        context: [M, C] the states, standardised.
        reading: what was read.
        table: [V, H] the embeddings, standardised.
        epochs: over all positions.
        dropout: on the states.
        seed: of order and dropout.
        progress: show a bar.
    """
    batch_size, peak = 512, 2e-3
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(expectation.parameters(), lr=peak, weight_decay=0.02)
    steps = epochs * -(-len(context) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=steps + 1)
    losses = []
    for _ in (bar := tqdm(range(epochs), desc="texts", unit="epoch", disable=not progress)):
        total = 0.0
        for rows in torch.split(torch.randperm(len(context), generator=order), batch_size):
            part = reading.at(rows)
            loss = expectation.loss(nn.functional.dropout(context[rows], dropout), part, table)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(rows)
        losses.append(total / len(context))
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    return losses
