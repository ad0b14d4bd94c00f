"""Tests once per model with recurrent layers whether it computes the right logits after a rollback.

Two rows read the same context and the same draft. Then each is rolled back to another position, and reads something
else. All logits must be those of an ordinary run over the text that is left. Slots that no query may see hold noise,
and the draft is far away from the context, so attention that does not obey the mask is found, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .eager import EagerRunner

DRAFT = 4  # tokens in a pass
KEPT = (1, 3)  # tokens of the first pass that stay, in each row


def rollback_texts(context: int) -> Tensor:
    """Return texts [3, context + DRAFT]: what is read first, and what each of the two rows has read in the end.

    Row `r` of the others begins like the first text, for `context + KEPT[r]` tokens.
    """
    texts = (7 * torch.arange(context + DRAFT) + 1).repeat(1 + len(KEPT), 1)
    for row, kept in enumerate(KEPT):
        texts[1 + row, context + kept :] += 3 + row
    return texts


def logits_token_by_token(model: PreTrainedModel, texts: Tensor, context: int, extra: dict[str, Any]) -> Tensor:
    """Return logits [R, L - context, V] after the tokens that follow the context, read one by one.

    Args:
        model: the model.
        texts: [R, L].
        context: how many tokens are in the cache.
        extra: more arguments of the model, its cache among them.
    """
    logits = []
    for column in range(context, texts.shape[1]):
        positions = {"position_ids": torch.full_like(texts[:, :1], column)} if "past_key_values" in extra else {}
        logits.append(model(input_ids=texts[:, column : column + 1], use_cache=True, **positions, **extra).logits)
    return torch.cat(logits, dim=1).float()


def rolled_back_logits(runner: EagerRunner, texts: Tensor, context: int, distance: int) -> Tensor:
    """Return logits [B, Q, V] after the tokens of a pass that follows a rollback, and of the one before it.

    Args:
        runner: the model, with an empty cache.
        texts: see `rollback_texts`.
        context: how many tokens are read at first.
        distance: free slots between the context and the other tokens.

    Returns:
        [3, DRAFT, V]: after each token that follows the context. For the two rows, the logits before the rollback are
        those of the first text.
    """
    rows, device = len(KEPT), texts.device
    order = torch.arange(context, device=device).expand(rows, -1)
    runner.reserve(rows, context + distance + 2 * DRAFT)
    runner.prefill(texts[:1, :context].expand(rows, -1), order, None)
    first = context + distance
    _fill_with_noise(runner, context)
    runner.cache.mark(first)
    kept = torch.tensor(KEPT, device=device)[:, None]
    before = _pass(runner, texts[:1, context:].expand(rows, -1), torch.zeros_like(kept), context, first)
    columns = context + kept + torch.arange(DRAFT, device=device)
    rest = texts[1:].gather(1, columns.clamp(max=texts.shape[1] - 1))
    after = _pass(runner, rest, kept, context, first)
    logits = [before[0]]
    for row, count in enumerate(KEPT):
        logits.append(torch.cat([before[row, :count], after[row, : DRAFT - count]]))
    return torch.stack(logits)


def _pass(runner: EagerRunner, tokens: Tensor, start: Tensor, context: int, first: int) -> Tensor:
    """Read tokens [B, DRAFT], each row from its token `start` [B, 1] after the context on; return logits."""
    order = start + torch.arange(DRAFT, device=tokens.device)
    slots = first + order
    every = torch.arange(first + 2 * DRAFT, device=tokens.device)
    visible = (every < context) | ((every >= first) & (every <= slots[:, :, None]))
    return runner.forward(tokens, context + order, slots, visible).logits.float()


def _fill_with_noise(runner: EagerRunner, first: int) -> None:
    generator = torch.Generator(runner.device).manual_seed(0)
    for _, layer in runner.cache.slot_layers():
        for states in (layer.keys, layer.values):
            unused = states[:, :, first:]
            noise = torch.randn(unused.shape, generator=generator, device=unused.device)
            unused.copy_(noise * states[:, :, :first].float().square().mean().sqrt())
