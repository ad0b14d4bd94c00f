"""`hf-specbranch chat`: talk to a pair; the cache is kept between turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, TextStreamer

from ..mixin import specbranch
from ..stats import SpecBranchStats
from . import options
from .printing import leaving_cleanly, note, stats_lines

COMMANDS = "/stats shows what the last answer took, /reset forgets the conversation, /quit leaves"


class Conversation:
    """Turns of one chat.

    The target's keys and values stay between turns: of each turn only what is new is read. With a chat template the
    whole conversation is written anew each time, and the cache is kept as far as the tokens agree; without one, lines
    and answers simply follow each other.

    Args:
        model: a SpecBranch model that remembers its draft.
        tokenizer: its tokenizer, with or without a chat template.
        asked: further arguments of `generate()`.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, asked: dict[str, Any]) -> None:
        self.model, self.tokenizer, self.asked = model, tokenizer, asked
        self.reset()

    def reset(self) -> None:
        """Forget everything said."""
        self.messages: list[dict[str, str]] = []
        self.text = torch.empty((1, 0), dtype=torch.long, device=self.model.device)  # [1, L] all turns so far
        self.cache = DynamicCache(config=self.model.config)
        self.read = self.text  # [1, M] the tokens in the cache
        self.kept = 0  # how many of them the last turn could use
        self.stats: list[SpecBranchStats] = []

    def answer(self, line: str, streamer: Any = None) -> str:
        """Say a line and return the answer. If it is interrupted, the conversation is as it was before."""
        messages = [*self.messages, {"role": "user", "content": line}]
        ids = self._ids(messages)
        kept = self._keep(ids)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=self.cache,
            streamer=streamer,
            return_dict_in_generate=True,
            **self.asked,
        )
        said: str = self.tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": said}]
        self.text, self.kept = out.sequences, kept
        self.read = out.sequences[:, : self.cache.get_seq_length()]
        self.stats.append(out.stats)
        return said

    def _ids(self, messages: list[dict[str, str]]) -> Tensor:
        """[1, L] the conversation up to the answer that is to come."""
        if self.tokenizer.chat_template is not None:
            written = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            return self._here(written["input_ids"])
        first = self.text.shape[1] == 0
        line = messages[-1]["content"] if first else "\n" + messages[-1]["content"]
        new = self._here(self.tokenizer(line, return_tensors="pt", add_special_tokens=first)["input_ids"])
        ended = not first and int(self.text[0, -1]) in self._ends()
        return torch.cat([self.text[:, :-1] if ended else self.text, new], dim=1)

    def _keep(self, ids: Tensor) -> int:
        """Crop the cache to what this text shares with the last, and say how much that is."""
        length = self.read.shape[1]
        shared = min(length, ids.shape[1] - 1)
        differs = (self.read[0, :shared] != ids[0, :shared]).nonzero()
        kept = int(differs[0, 0]) if len(differs) else shared
        if kept < length:
            try:
                self.cache.crop(kept - length)  # below 0: how many to remove
            except RuntimeError:  # a sliding window has let go of what would be needed
                self.cache, kept = DynamicCache(config=self.model.config), 0
        self.read = self.read[:, :kept]
        return kept

    def _ends(self) -> list[int]:
        ends = self.model.generation_config.eos_token_id
        return [] if ends is None else ends if isinstance(ends, list) else [ends]

    def _here(self, ids: Tensor) -> Tensor:
        return ids.to(self.model.device)


def chat(
    target: options.Target = None,
    draft: options.Draft = None,
    head: options.Head = None,
    config: options.Config = None,
    policy: options.Policy = None,
    gamma: options.Gamma = None,
    epsilon: options.Epsilon = None,
    branches: options.Branches = None,
    runtime: options.Runtime = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    threads: options.Threads = 0,
    as_json: options.Json = False,
) -> None:
    """Talk to a pair, line by line: /stats, /reset, /quit. Ctrl-C stops an answer.

    Example: hf-specbranch chat --target org/large-chat --draft org/small-chat --temperature 0.7
    """
    settings = options.settings_from(config, policy, gamma, epsilon, branches, runtime)
    asked = options.sampling_from(temperature, top_k, top_p) | {
        "specbranch": settings,
        "length_head": options.head_from(head, target, draft, device),
        "max_new_tokens": max_new_tokens,
    }
    with leaving_cleanly():
        large, small, tokenizer = options.open_pair(target, draft, device, dtype, threads)
        torch.manual_seed(seed)
        conversation = Conversation(specbranch(large, draft=small), tokenizer, asked)
        if tokenizer.chat_template is None:
            note("This tokenizer has no chat template: your lines are continued as they are.")
        if sys.stdin.isatty():
            note(COMMANDS)
        for line in _lines():
            if line == "/quit":
                break
            if line.startswith("/"):
                _obey(line, conversation)
            else:
                _answer(line, conversation, as_json)


def _lines() -> Iterator[str]:
    """What the user types, or what is piped in; empty lines are passed over."""
    while True:
        try:
            line = input("> ") if sys.stdin.isatty() else input()
        except EOFError:
            return
        if line.strip():
            yield line.strip()


def _obey(line: str, conversation: Conversation) -> None:
    if line == "/reset":
        conversation.reset()
        note("forgotten")
    elif line != "/stats":
        note(f"{line}: no such command; {COMMANDS}")
    elif not conversation.stats:
        note("nothing said yet")
    else:
        turns, last = conversation.stats, conversation.stats[-1]
        note("\n".join(stats_lines(last)))
        note(f"{conversation.kept} tokens of the prompt were in the cache")
        seconds = sum(stats.total_seconds for stats in turns)
        note(f"{len(turns)} answers, {sum(stats.new_tokens for stats in turns) / seconds:.1f} tokens a second")


def _answer(line: str, conversation: Conversation, as_json: bool) -> None:
    streamer = None if as_json else TextStreamer(conversation.tokenizer, skip_prompt=True, skip_special_tokens=True)
    try:
        said = conversation.answer(line, streamer)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        note("\n(stopped; this turn is forgotten)")
        return
    if as_json:
        print(json.dumps({"answer": said, "stats": conversation.stats[-1].to_dict()}), flush=True)
