"""Letting the target write and read texts, to learn what its states expect."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from .expectation import Reading

CANDIDATES = 16  # of each distribution are kept
STORED = torch.bfloat16


@torch.no_grad()
def read_texts(
    target: PreTrainedModel,
    tokenizer: Any,
    texts: list[str],
    num_layers: int,
    places: int,
    new_tokens: int = 48,
    batch_size: int = 32,
    seed: int = 0,
    progress: bool = True,
) -> Reading:
    """Let the target continue texts, greedy and at temperature 0.8 in turn, and note what it thought at each position.

    Args:
        target: the model a head will read.
        tokenizer: its.
        texts: beginnings.
        num_layers: K, how many of its last layers.
        places: D, how many tokens ahead.
        new_tokens: to write behind each text.
        batch_size: texts at a time.
        seed: of the sampling.
        progress: show a bar.
    """
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    parts: list[tuple[Tensor, ...]] = []
    with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
        torch.manual_seed(seed)
        for number, first in enumerate(tqdm(range(0, len(texts), batch_size), desc="reading", disable=not progress)):
            batch = tokenizer(
                texts[first : first + batch_size], return_tensors="pt", padding=True, padding_side="left"
            ).to(target.device)
            mask = batch["attention_mask"]
            sampling: dict[str, Any] = dict(do_sample=True, temperature=0.8, top_k=0, top_p=1.0)
            sequences = target.generate(
                batch["input_ids"],
                attention_mask=mask,
                max_new_tokens=new_tokens,
                **(sampling if number % 2 else dict(do_sample=False)),
            )
            mask = torch.nn.functional.pad(mask, (0, sequences.shape[1] - mask.shape[1]), value=1)
            mask = mask * (sequences != tokenizer.pad_token_id)
            parts += [_read(target, row[kept > 0], num_layers, places) for row, kept in zip(sequences, mask)]
    hidden, tokens, likely, chance = (torch.cat(part) for part in zip(*parts))
    return Reading(hidden, tokens, likely, chance, target.get_input_embeddings().weight.detach().float().cpu())


def _read(target: PreTrainedModel, tokens: Tensor, num_layers: int, places: int) -> tuple[Tensor, ...]:
    """One text's positions, as the first four fields of a `Reading`."""
    seen = target(tokens[None], output_hidden_states=True)
    count = max(0, len(tokens) - 1 - places)  # positions with a token and all places behind them
    hidden = torch.stack(seen.hidden_states[-num_layers:], dim=2)[0, :count]  # [M, K, H]
    offsets = torch.arange(count, device=tokens.device)[:, None] + torch.arange(places + 1, device=tokens.device)
    best = seen.logits[0].float().softmax(-1).topk(CANDIDATES, dim=-1)
    ahead = offsets[:, 1:]  # the distribution behind the chosen token is that of the first place
    return (
        hidden.to(STORED).cpu(),
        tokens[offsets + 1].cpu(),
        best.indices[ahead].cpu(),
        best.values[ahead].cpu(),
    )
