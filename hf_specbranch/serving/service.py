"""Answers requests with an engine: from the fields of a request to the events of its answers.

Events are plain dictionaries, so that they can come from another process. A request gives any number of events
`{"choice", "text", "logprobs", "finish_reason"}`, then one `{"usage"}`; or an `ApiError`, before or after the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from .api_errors import ApiError
from .api_request import SEEDS, ApiRequest, Endpoint, read_request
from .completion import Completion, CompletionSettings, TokenLogprobs
from .engine import Engine
from .metrics import Metrics
from .row_sampling import Sampling

Event = dict[str, Any]


class Backend(Protocol):
    """What the HTTP server asks for answers: a `Service` in this process, or one in other processes."""

    def events(self, endpoint: Endpoint, body: Any) -> AsyncIterator[Event]:
        """Yield the events of a request."""
        ...

    async def models(self) -> list[str]:
        """Return the names of the models."""
        ...

    async def metrics(self) -> str:
        """Return metrics in the format of Prometheus."""
        ...

    async def healthy(self) -> bool:
        """Return whether requests can be answered."""
        ...


@dataclass(frozen=True)
class Limits:
    """What a request may ask for at most.

    Args:
        prompt_tokens: of one prompt; None: as many as the context has room for.
        output_tokens: of one answer; None: likewise.
        waiting: answers that wait for a row; further requests are refused with status 429.
    """

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    waiting: int = 1024


class Service:
    """Answers requests with an engine of this process.

    Args:
        engine: generates the answers.
        name: of the model.
        limits: on prompts and answers.
    """

    def __init__(self, engine: Engine, name: str, limits: Limits | None = None) -> None:
        self.engine, self.name, self.limits, self.tokenizer = engine, name, limits or Limits(), engine.tokenizer
        self.counts = Metrics(engine)

    async def models(self) -> list[str]:
        return [self.name]

    async def metrics(self) -> str:
        return self.counts.text()

    async def healthy(self) -> bool:
        return self.engine.thread.is_alive() and not self.engine.closing

    async def events(self, endpoint: Endpoint, body: Any) -> AsyncIterator[Event]:
        request = read_request(endpoint, body)
        if request.model != self.name:
            message = f"the model {request.model!r} does not exist: this server has {self.name!r}"
            raise ApiError(404, message, "model", "model_not_found")
        prompts = self._prompts(endpoint, request)
        loop, grown = asyncio.get_running_loop(), asyncio.Queue[int]()
        answers: list[Completion] = []
        try:
            for choice in range(len(prompts) * request.n):
                prompt, copy = prompts[choice // request.n], choice % request.n
                answers.append(self._submit(prompt, self._settings(request, prompt, copy), loop, grown, choice))
            async for event in self._follow(answers, grown):
                yield event
            yield {"usage": usage(prompts, answers)}
        finally:  # nobody reads on: also if the client has gone away
            for answer in answers:
                answer.cancel()
            self.counts.add(answers)

    # ---- prompts

    def _prompts(self, endpoint: Endpoint, request: ApiRequest) -> list[list[int]]:
        if endpoint == "chat":
            prompts = [chat_tokens(self.tokenizer, request.messages)]
        else:
            prompts = [self._tokens(each) for each in request.prompts]
        for prompt in prompts:
            self._check_length(prompt, request.max_tokens, "messages" if endpoint == "chat" else "prompt")
        wanted = len(prompts) * request.n
        if len(self.engine.queue) + wanted > self.limits.waiting:
            raise ApiError(429, f"{len(self.engine.queue)} answers are waiting already: try again later")
        return prompts

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt).input_ids)
        vocabulary = self.engine.vocabulary
        if not all(0 <= token < vocabulary for token in prompt):
            raise ApiError(400, f"prompt: expected tokens from 0 to {vocabulary - 1}", "prompt", "invalid_value")
        return prompt

    def _check_length(self, prompt: list[int], wanted: int | None, param: str) -> None:
        limits, context = self.limits, self.engine.max_length
        most = min(limits.prompt_tokens or context - 1, context - 1)
        if not prompt:
            raise ApiError(400, f"{param} is empty: give at least one token", param)
        if len(prompt) > most:
            message = f"{param} has {len(prompt)} tokens: expected {most} at most"
            raise ApiError(400, message, param, "context_length_exceeded")
        room = min(limits.output_tokens or context, context - len(prompt))
        if wanted is not None and wanted > room:
            message = f"max_tokens={wanted}: after a prompt of {len(prompt)} tokens expected {room} at most"
            raise ApiError(400, message, "max_tokens", "context_length_exceeded")

    # ---- answers

    def _settings(self, request: ApiRequest, prompt: list[int], copy: int) -> CompletionSettings:
        """Return the settings of an answer; `copy` counts the answers to one prompt, which have seeds of their own."""
        context = self.engine.max_length
        room = min(self.limits.output_tokens or context, context - len(prompt))
        sampling = Sampling(request.temperature, request.top_p, (request.seed + copy) % SEEDS)
        most = room if request.max_tokens is None else request.max_tokens
        return CompletionSettings(most, sampling, request.stop, self.engine.ends, request.logprobs)

    def _submit(
        self, prompt: list[int], settings: CompletionSettings, loop: asyncio.AbstractEventLoop,
        grown: asyncio.Queue[int], choice: int,
    ) -> Completion:  # fmt: skip
        def update(_: Completion) -> None:
            try:
                loop.call_soon_threadsafe(grown.put_nowait, choice)
            except RuntimeError:  # the server has ended
                pass

        try:
            return self.engine.submit(Completion(prompt, settings, self.tokenizer, update))
        except RuntimeError as error:
            raise ApiError(503, f"{error}: the server is shutting down") from error

    async def _follow(self, answers: list[Completion], grown: asyncio.Queue[int]) -> AsyncIterator[Event]:
        """Yield what is new in the answers, until all have ended."""
        sent, sent_logprobs, open_ = [0] * len(answers), [0] * len(answers), set(range(len(answers)))
        while open_:
            choice = await grown.get()
            if choice not in open_:
                continue
            answer = answers[choice]
            reason = answer.reported  # before the text: it may grow meanwhile
            if reason == "error":
                raise ApiError(500, f"generation failed: {answer.error}")
            text = answer.text()
            if reason is None and len(text) == sent[choice]:
                continue
            logprobs = answer.logprobs[sent_logprobs[choice] :]
            yield {
                "choice": choice,
                "text": text[sent[choice] :],
                "logprobs": None if answer.settings.logprobs is None else [self._named(each) for each in logprobs],
                "finish_reason": reason,
            }
            sent[choice] = len(text)
            sent_logprobs[choice] += len(logprobs)
            if reason is not None:
                open_.remove(choice)

    def _named(self, logprobs: TokenLogprobs) -> dict[str, Any]:
        def entry(token: int, value: float) -> dict[str, Any]:
            text = str(self.tokenizer.decode([token]))
            return {"token": text, "logprob": value, "bytes": list(text.encode())}

        top = [entry(token, value) for token, value in logprobs.top]
        return {**entry(logprobs.token, logprobs.logprob), "top_logprobs": top}


def chat_tokens(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Return the tokens of a conversation. Without a chat template, messages follow each other line by line."""
    if tokenizer.chat_template is None:
        return list(tokenizer("\n".join(message["content"] for message in messages)).input_ids)
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    except Exception as error:  # templates refuse conversations in their own ways
        raise ApiError(400, f"messages: the chat template refuses them ({error})", "messages") from error
    return list(ids["input_ids"])


def usage(prompts: list[list[int]], answers: list[Completion]) -> dict[str, Any]:
    """Return the tokens that a request took, and how its drafts fared."""
    read, new = sum(map(len, prompts)), sum(len(answer.tokens) for answer in answers)
    drafted = sum(answer.stats.num_draft_tokens for answer in answers)
    accepted = sum(answer.stats.num_accepted_tokens for answer in answers)
    passes = sum(answer.stats.target_forwards for answer in answers)
    return {
        "prompt_tokens": read,
        "completion_tokens": new,
        "total_tokens": read + new,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "specbranch": {
            "target_passes": passes,
            "tokens_per_pass": round(new / passes, 3) if passes else 0.0,
            "draft_acceptance_rate": round(accepted / drafted, 3) if drafted else 0.0,
        },
    }
