"""Evaluate the trained models: bits per byte, agreement, loops, and whether the text is Python."""

import ast
import math
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase


class Continuations(NamedTuple):
    """Greedy outputs for a list of prompts, left-padded to one length."""

    ids: Tensor  # [B, P + N]
    mask: Tensor  # [B, P + N] 1 at real tokens (prompt and output up to and with end-of-text)
    prompt_length: int  # P


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, tokens: Tensor, num_bytes: int, context: int) -> float:
    """Return the negative log-likelihood of held-out text, in bits per byte. tokens: [N]"""
    length = len(tokens) // context * context
    rows = tokens[:length].long().view(-1, context)
    nll = torch.zeros((), dtype=torch.float64, device=tokens.device)
    for part in rows.split(16):
        logits = model(input_ids=part[:, :-1], use_cache=False).logits.float()
        nll += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
    predicted = rows.numel() - len(rows)  # the first token of a row has no context and is not counted
    return float(nll) / math.log(2) / (num_bytes * predicted / len(tokens))


@torch.no_grad()
def continuations(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: list[str], new_tokens: int
) -> Continuations:
    """Return the target's greedy outputs, in the model's precision."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
    prompt_length = batch["input_ids"].shape[1]
    ids = model.generate(
        batch["input_ids"], attention_mask=batch["attention_mask"], do_sample=False, max_new_tokens=new_tokens
    )
    written = (ids[:, prompt_length:] != model.config.pad_token_id).long()
    return Continuations(ids, torch.cat([batch["attention_mask"], written], dim=1), prompt_length)


@torch.no_grad()
def agreement(draft: LlamaForCausalLM, outputs: Continuations) -> float:
    """Return how often the draft's likeliest token is the target's, over all generated tokens."""
    logits = torch.cat(
        [
            draft(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, outputs.prompt_length - 1 : -1]
            for ids, mask in zip(outputs.ids.split(32), outputs.mask.split(32), strict=True)
        ]
    )  # [B, N, V]
    written = outputs.mask[:, outputs.prompt_length :].bool()
    equal = logits.argmax(-1) == outputs.ids[:, outputs.prompt_length :]
    return float(equal[written].float().mean())


def in_loop(ids: list[int], longest_period: int = 64, shortest_run: int = 60) -> bool:
    """Return True if the text ends in three or more copies of one pattern of at most `longest_period` tokens.

    The copies must cover the last `shortest_run` tokens at least, so `), ), ),` alone is not a loop.
    """
    for period in range(1, longest_period + 1):
        run = max(shortest_run, 3 * period)
        tail = ids[-run:]
        if len(tail) == run and tail[period:] == tail[:-period]:
            return True
    return False


def is_python(text: str, unfinished_lines: int = 8) -> bool:
    """Return True if the text parses once at most `unfinished_lines` are dropped from its end."""
    lines = text.split("\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        for drop in range(unfinished_lines + 1):
            try:
                ast.parse("\n".join(lines[: len(lines) - drop]))
            except (SyntaxError, ValueError):
                continue
            return True
    return False


def describe(tokenizer: PreTrainedTokenizerBase, outputs: Continuations, eos: int) -> dict[str, float]:
    """Count loops, outputs that ended by themselves, and outputs that parse, over all prompts."""
    loops = ended = python = 0
    length = 0
    for ids, mask in zip(outputs.ids, outputs.mask, strict=True):
        written = ids[outputs.prompt_length :][mask[outputs.prompt_length :].bool()].tolist()
        loops += in_loop(written)
        ended += eos in written
        length += len(written)
        python += is_python(tokenizer.decode(ids[mask.bool()], skip_special_tokens=True))
    return {
        "prompts": len(outputs.ids),
        "loops": loops,
        "ended": ended,
        "parse_as_python": python,
        "mean_length": length / len(outputs.ids),
    }
