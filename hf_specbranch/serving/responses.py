"""Makes responses in OpenAI's format from the events of a request."""

from __future__ import annotations

import secrets
import time
from typing import Any

from .api_request import Endpoint
from .service import Event

OBJECTS = {"chat": "chat.completion", "completions": "text_completion"}
IDS = {"chat": "chatcmpl-", "completions": "cmpl-"}


class Response:
    """The response to one request, as a whole or in chunks.

    Args:
        endpoint: which one the request came to.
        model: the name in the request.
        include_usage: the last chunk has the usage.
    """

    def __init__(self, endpoint: Endpoint, model: str, include_usage: bool = False) -> None:
        self.endpoint, self.include_usage = endpoint, include_usage
        self.head = {"id": IDS[endpoint] + secrets.token_hex(12), "created": int(time.time()), "model": model}
        self.begun: set[int] = set()  # choices of which a chunk was sent
        self.lengths: dict[int, int] = {}  # characters of each choice so far

    def whole(self, events: list[Event]) -> dict[str, Any]:
        """Return the response in one piece."""
        parts: dict[int, list[Event]] = {}
        for event in events:
            if "choice" in event:
                parts.setdefault(event["choice"], []).append(event)
        choices = [self._whole_choice(choice, each) for choice, each in sorted(parts.items())]
        usage = next(event["usage"] for event in events if "usage" in event)
        return {**self.head, "object": OBJECTS[self.endpoint], "choices": choices, "usage": usage}

    def _whole_choice(self, choice: int, events: list[Event]) -> dict[str, Any]:
        text = "".join(event["text"] for event in events)
        logprobs = [each for event in events for each in event["logprobs"] or ()]
        has_logprobs = any(event["logprobs"] is not None for event in events)
        content: dict[str, Any] = {"text": text}
        if self.endpoint == "chat":
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {
            "index": choice,
            **content,
            "logprobs": self._logprobs(choice, logprobs) if has_logprobs else None,
            "finish_reason": events[-1]["finish_reason"],
        }

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """Return what to stream for an event."""
        is_chat = self.endpoint == "chat"
        head = {**self.head, "object": OBJECTS["chat"] + ".chunk" if is_chat else OBJECTS["completions"]}
        if "usage" in event:
            return [{**head, "choices": [], "usage": event["usage"]}] if self.include_usage else []
        choice, logprobs = event["choice"], event["logprobs"]
        content: dict[str, Any] = {"text": event["text"]}
        if is_chat:
            role = {} if choice in self.begun else {"role": "assistant"}
            content = {"delta": {**role, "content": event["text"]}}
        self.begun.add(choice)
        body = {
            "index": choice,
            **content,
            "logprobs": None if logprobs is None else self._logprobs(choice, logprobs),
            "finish_reason": event["finish_reason"],
        }
        return [{**head, "choices": [body]}]

    def _logprobs(self, choice: int, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.endpoint == "chat":
            return {"content": logprobs, "refusal": None}
        offsets = []
        for each in logprobs:
            offsets.append(self.lengths.get(choice, 0))
            self.lengths[choice] = offsets[-1] + len(each["token"])
        return {
            "tokens": [each["token"] for each in logprobs],
            "token_logprobs": [each["logprob"] for each in logprobs],
            "top_logprobs": [{top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in logprobs],
            "text_offset": offsets,
        }
