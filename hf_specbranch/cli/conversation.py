"""A conversation with a model that keeps its KV cache between turns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..stats import SpecBranchStats


class Conversation:
    """The turns of one chat.

    The target's KV cache is kept between turns, so each turn reads only what is new. With a chat template the whole
    conversation is tokenized again each time, and the cache is kept as far as the tokens agree. Without one, the
    user's lines and the answers follow each other.

    Args:
        model: a SpecBranch model that remembers its draft.
        tokenizer: its tokenizer, with or without a chat template.
        arguments: further arguments of `generate()`.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, arguments: dict[str, Any]) -> None:
        self.model, self.tokenizer, self.arguments = model, tokenizer, arguments
        self.reset()

    def reset(self) -> None:
        """Start a new conversation."""
        self.messages: list[dict[str, str]] = []
        self.text = torch.empty((1, 0), dtype=torch.long, device=self.model.device)  # [1, L] all turns so far
        self.cache = DynamicCache(config=self.model.config)
        self.read = self.text  # [1, M] the tokens in the cache
        self.kept = 0  # how many of them the last turn reused
        self.stats: list[SpecBranchStats | None] = []  # of each turn; None: transformers' own decoding ran

    def answer(self, line: str, streamer: Any = None) -> str:
        """Answer a line of the user.

        If this is interrupted, KeyboardInterrupt is raised, and the conversation goes on after the tokens that were
        generated until then; it stays as it was if there are none.
        """
        messages = [*self.messages, {"role": "user", "content": line}]
        ids = self._ids(messages)
        kept = self._keep(ids)
        streamed = Streamed(streamer)
        try:
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=self.cache,
                streamer=streamed,
                return_dict_in_generate=True,
                **self.arguments,
            )
        except KeyboardInterrupt:
            if tokens := streamed.tokens[ids.shape[1] :]:
                self._add(messages, torch.cat([ids, self._here(torch.tensor([tokens]))], dim=1), ids.shape[1])
            raise
        answer = self._add(messages, out.sequences, ids.shape[1])
        self.kept = kept
        self.read = out.sequences[:, : self.cache.get_seq_length()]
        self.stats.append(getattr(out, "stats", None))
        return answer

    def _add(self, messages: list[dict[str, str]], text: Tensor, before: int) -> str:
        """Add a turn whose tokens are `text` [1, L], `before` of them before the answer; return the answer."""
        answer: str = self.tokenizer.decode(text[0, before:], skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        self.text = text
        return answer

    def _ids(self, messages: list[dict[str, str]]) -> Tensor:
        """Return the tokens [1, L] of the conversation up to the next answer."""
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
        """Crop the cache to the prefix that it shares with `ids` [1, L], and return the length of that prefix."""
        length = self.read.shape[1]
        if self.cache.get_seq_length() != length:  # transformers' own decoding was interrupted, and has added to it
            self.cache, length = DynamicCache(config=self.model.config), 0
        shared = min(length, ids.shape[1] - 1)
        differs = (self.read[0, :shared] != ids[0, :shared]).nonzero()
        kept = int(differs[0, 0]) if len(differs) else shared
        if kept < length:
            try:
                self.cache.crop(kept - length)  # negative: how many to remove
            except RuntimeError:  # a sliding window has dropped what would be needed
                self.cache, kept = DynamicCache(config=self.model.config), 0
        self.read = self.read[:, :kept]
        return kept

    def _ends(self) -> list[int]:
        ends = self.model.generation_config.eos_token_id
        return [] if ends is None else ends if isinstance(ends, list) else [ends]

    def _here(self, ids: Tensor) -> Tensor:
        return ids.to(self.model.device)


class Streamed:
    """A streamer that keeps the tokens, those of the prompt first, and passes them on to another streamer if there is
    one."""

    def __init__(self, streamer: Any = None) -> None:
        self.streamer = streamer
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()
        if self.streamer is not None:
            self.streamer.put(value)

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()
