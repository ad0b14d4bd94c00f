"""Reads requests in OpenAI's format; every field is checked before any work starts."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from .api_errors import ApiError, unsupported

Endpoint = Literal["chat", "completions"]

MOST_CHOICES, MOST_STOPS, MOST_LOGPROBS = 128, 16, 20
SEEDS = 1 << 63  # seeds are 64-bit numbers
DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's completions
ROLES = ("system", "developer", "user", "assistant")

# What a field must be if it is given; other values would need something that is not here.
ONLY: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "echo": (False,), "suffix": ("",),
    "tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "parallel_tool_calls": (True, False),
}  # fmt: skip
IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "reasoning_effort",
    "verbosity", "prediction",
}  # fmt: skip
COMMON = {"model", "max_tokens", "temperature", "top_p", "n", "stream", "stream_options", "stop", "seed", "logprobs"}
OWN: dict[Endpoint, set[str]] = {
    "chat": {"messages", "max_completion_tokens", "top_logprobs"},
    "completions": {"prompt", "best_of"},
}


@dataclass(frozen=True)
class ApiRequest:
    """A request whose fields are valid."""

    model: str
    prompts: list[str | list[int]]  # of completions
    messages: list[dict[str, str]]  # of a chat
    max_tokens: int | None  # None: as many as there is room for
    temperature: float
    top_p: float
    n: int
    stop: tuple[str, ...]
    seed: int
    logprobs: int | None
    stream: bool
    include_usage: bool


def read_request(endpoint: Endpoint, body: Any) -> ApiRequest:
    """Return what a request asks for.

    Args:
        endpoint: which one it came to.
        body: its JSON.

    Raises:
        ApiError: some field is missing, unknown, of the wrong type or out of range.
    """
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is {_kind(body)}: expected a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name not in COMMON | OWN[endpoint] | IGNORED | ONLY.keys():
            raise ApiError(400, f"unknown field {name!r}", name, "unknown_parameter")
        if name in ONLY and value not in ONLY[name]:
            raise unsupported(name, "leave it out")
    fields = Fields(given)
    n = fields.whole("n", 1, 1, MOST_CHOICES)
    if fields.whole("best_of", n, 1, MOST_CHOICES) != n:
        raise unsupported("best_of", f"leave it out, or give n={n}")
    options = fields.of("stream_options", {}, dict)
    if options and not fields.of("stream", False, bool):
        raise ApiError(400, "stream_options without stream: give both or none", "stream_options")
    seed = fields.of("seed", None, int)
    limit = fields.whole("max_completion_tokens", 0, 1) or fields.whole("max_tokens", 0, 1) or None
    return ApiRequest(
        model=fields.required("model", str),
        prompts=_prompts(fields.required("prompt", (str, list))) if endpoint == "completions" else [],
        messages=_messages(fields.required("messages", list)) if endpoint == "chat" else [],
        max_tokens=limit or (DEFAULT_COMPLETION_TOKENS if endpoint == "completions" else None),
        temperature=fields.number("temperature", 1.0, lambda value: 0 <= value <= 2, "a number from 0 to 2"),
        top_p=fields.number("top_p", 1.0, lambda value: 0 < value <= 1, "a number above 0 and up to 1"),
        n=n,
        stop=_stops(fields.of("stop", [], (str, list))),
        seed=secrets.randbelow(SEEDS) if seed is None else seed % SEEDS,
        logprobs=_logprobs(endpoint, fields),
        stream=fields.of("stream", False, bool),
        include_usage=bool(options.get("include_usage")),
    )


class Fields:
    """The fields of a request.

    Args:
        given: by name.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given

    def of(self, name: str, default: Any, kind: type | tuple[type, ...]) -> Any:
        """Return a field of some type, or the default."""
        if name not in self.given:
            return default
        value = self.given[name]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(NAMES[each] for each in kinds)
            raise ApiError(400, f"{name} is {_kind(value)}: expected {expected}", name, "invalid_type")
        return value

    def required(self, name: str, kind: type | tuple[type, ...]) -> Any:
        """Return a field that must be there."""
        if name not in self.given:
            raise ApiError(400, f"{name} is missing", name, "missing_required_parameter")
        return self.of(name, None, kind)

    def whole(self, name: str, default: int, least: int, most: int | None = None) -> int:
        """Return a whole number within a range."""
        value: int = self.of(name, default, int)
        if name in self.given and (value < least or (most is not None and value > most)):
            expected = f"at least {least}" if most is None else f"from {least} to {most}"
            raise ApiError(400, f"{name}={value}: expected a whole number, {expected}", name, "invalid_value")
        return value

    def number(self, name: str, default: float, is_valid: Callable[[float], bool], expected: str) -> float:
        """Return a number that some test accepts."""
        value = float(self.of(name, default, (float, int)))
        if not is_valid(value):
            raise ApiError(400, f"{name}={value:g}: expected {expected}", name, "invalid_value")
        return value


NAMES: dict[type, str] = {
    str: "a string", int: "a whole number", float: "a number", bool: "true or false", list: "a list",
    dict: "an object",
}  # fmt: skip


def _kind(value: Any) -> str:
    return NAMES.get(type(value), "null")


def _stops(given: str | list[Any]) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given
    if not all(isinstance(each, str) and each for each in stops) or len(stops) > MOST_STOPS:
        raise ApiError(400, f"stop: expected a string, or up to {MOST_STOPS} of them, none empty", "stop")
    return tuple(stops)


def _logprobs(endpoint: Endpoint, fields: Fields) -> int | None:
    if endpoint == "completions":
        return fields.whole("logprobs", 0, 0, MOST_LOGPROBS) if "logprobs" in fields.given else None
    top = fields.whole("top_logprobs", 0, 0, MOST_LOGPROBS)
    if fields.of("logprobs", False, bool):
        return top
    if top:
        raise ApiError(400, "top_logprobs without logprobs: give logprobs=true too", "top_logprobs")
    return None


def _prompts(given: str | list[Any]) -> list[str | list[int]]:
    """Return the prompts: a text, a list of texts, a list of tokens, or a list of these."""
    if isinstance(given, str):
        return [given]
    if given and all(type(each) is int for each in given):
        return [given]
    if not given or not all(isinstance(each, str) or _is_tokens(each) for each in given):
        raise ApiError(400, "prompt: expected a string, a list of strings, or lists of tokens", "prompt")
    return list(given)


def _is_tokens(given: Any) -> bool:
    return isinstance(given, list) and all(type(each) is int for each in given)


def _messages(given: list[Any]) -> list[dict[str, str]]:
    if not given:
        raise ApiError(400, "messages is empty: expected at least one message", "messages")
    return [_message(each, f"messages[{at}]") for at, each in enumerate(given)]


def _message(given: Any, where: str) -> dict[str, str]:
    if not isinstance(given, dict) or given.get("role") not in ROLES:
        raise ApiError(400, f"{where}: expected an object with a role, one of {', '.join(ROLES)}", where)
    content = given.get("content")
    if isinstance(content, list):  # parts, of which only texts are known
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise ApiError(400, f"{where}.content: only parts of type text are supported", where)
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise ApiError(400, f"{where}.content is {_kind(content)}: expected a string", where)
    return {"role": "system" if given["role"] == "developer" else given["role"], "content": content}
