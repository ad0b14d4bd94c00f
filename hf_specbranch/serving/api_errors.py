"""Errors in the format of OpenAI's API."""

from __future__ import annotations

from typing import Any

TYPES = {
    401: "invalid_request_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(Exception):
    """A request that is refused, or that failed.

    Args:
        status: the HTTP status.
        message: what was given, what was expected and what to do.
        param: the field of the request that is wrong.
        code: a word for programs, such as "context_length_exceeded".
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def __reduce__(self) -> Any:
        return type(self), (self.status, self.message, self.param, self.code)

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the response."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def unsupported(name: str, remedy: str) -> ApiError:
    """Return the error for a field that exists in OpenAI's API but not here."""
    return ApiError(400, f"{name} is not supported: {remedy}", name, "unsupported_parameter")
