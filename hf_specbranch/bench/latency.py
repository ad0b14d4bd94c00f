"""Further measurements of specbranch: time to the first token, the cost of a round by context, steadiness."""

from __future__ import annotations

from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from .timing import TimingStreamer, allocated_memory, generate_once
from .ways import Choices, Pair, Way

FIRST_TOKENS = 8  # generated to see the first of them
ROUND_TOKENS = 96  # generated to see what a round costs
REPEATS = 5


def prompt_of_length(all_inputs: list[dict[str, Tensor]], length: int) -> dict[str, Tensor]:
    """The prompts one behind the other, again and again, cut to `length` tokens: [1, length]."""
    joined = torch.cat([inputs["input_ids"] for inputs in all_inputs], dim=1)
    ids = joined.repeat(1, -(-length // joined.shape[1]))[:, :length]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def check_context(pair: Pair, lengths: tuple[int, ...], room: int = FIRST_TOKENS) -> None:
    """Refuse prompts that leave no room for new tokens in a model's context."""
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        for length in lengths:
            if limit is not None and length + room > limit:
                raise ValueError(
                    f"a prompt of {length} tokens leaves no room for {room} more in the {role}'s context of {limit}: "
                    f"choose at most {limit - room}"
                )


def time_to_first_token(
    pair: Pair, all_inputs: list[dict[str, Tensor]], choices: Choices, length: int, repeats: int = REPEATS
) -> dict[str, Any]:
    """Plain `generate()` and specbranch in turns on a prompt of `length` tokens, warm; medians."""
    inputs = prompt_of_length(all_inputs, length)
    ways = {"plain": Way("plain"), "specbranch": Way("specbranch", choices.settings("specbranch"), drafts=True)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, way in ways.items():
            streamer = TimingStreamer()
            generate_once(pair, way, inputs, FIRST_TOKENS, streamer)
            seconds[name].append(streamer.time_to_first_token)
    plain, ours = (median(seconds[name][1:]) for name in ways)  # the first is a warm-up
    return {"prompt_tokens": length, "plain_ms": plain * 1000, "specbranch_ms": ours * 1000, "ratio": ours / plain}


def round_cost(
    pair: Pair, all_inputs: list[dict[str, Tensor]], choices: Choices, contexts: tuple[int, ...], repeats: int = REPEATS
) -> list[dict[str, Any]]:
    """Milliseconds a round of specbranch at each context: the time behind the first token over the passes behind it."""
    way = Way("specbranch", choices.settings("specbranch"), drafts=True)
    rows: list[dict[str, Any]] = []
    for context in contexts:
        inputs, costs, passes = prompt_of_length(all_inputs, context), [], 0
        for _ in range(repeats + 2):
            stats = generate_once(pair, way, inputs, _room(pair, context)).stats
            assert stats is not None
            passes = stats.target_forwards - 1  # the prompt's pass gives the first token
            costs.append((stats.total_seconds - stats.time_to_first_token) / max(1, passes) * 1000)
        ms = median(costs[2:])  # the first two meet sizes for the first time
        ratio = ms / rows[0]["ms_per_round"] if rows else 1.0
        rows.append({"context": context, "ms_per_round": ms, "rounds": passes, "ratio_to_first": ratio})
    return rows


def _room(pair: Pair, context: int) -> int:
    limit = getattr(pair.target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return ROUND_TOKENS if limit is None else min(ROUND_TOKENS, limit - context)


def stability(pair: Pair, inputs: dict[str, Tensor], choices: Choices, times: int, new_tokens: int) -> dict[str, Any]:
    """Specbranch on the same prompt `times` times: speed of the last tenth over the first, and memory in use."""
    way = Way("specbranch", choices.settings("specbranch"), drafts=True)
    generate_once(pair, way, inputs, new_tokens)  # a warm-up
    speeds, memory = [], []
    for _ in range(times):
        found = generate_once(pair, way, inputs, new_tokens)
        speeds.append(len(found.tokens) / found.seconds)
        memory.append(allocated_memory(pair.target))
    tenth = max(1, times // 10)
    return {
        "runs": times,
        "first_tenth_tokens_per_second": mean(speeds[:tenth]),
        "last_tenth_tokens_per_second": mean(speeds[-tenth:]),
        "ratio": mean(speeds[-tenth:]) / mean(speeds[:tenth]),
        "allocated_bytes_first": memory[0],
        "allocated_bytes_last": memory[-1],
        "tokens_per_second": speeds,
    }
