"""Errors as HTTP sees them: one status, one OpenAI error body for each typed error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import JSONResponse

from caudal.core import (
    CaudalError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    QueueFullError,
    RequestTooLongError,
    UnsupportedModelError,
)


class ListenError(CaudalError):
    """The server cannot listen on the address: in use, not allowed, unknown, or open to others without a key."""


class ApiError(CaudalError):
    """An error that only the HTTP layer can find, with everything its response needs.

    `type`, `param` and `code` are the fields of OpenAI's error object.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """OpenAI's error object: `{"error": {"message", "type", "param", "code"}}`."""
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}


ErrorBody = Callable[[ApiError], Mapping[str, Any]]


class ErrorShapes:
    """Which routes answer with which body for an error. OpenAI's is for all that no dialect claims."""

    def __init__(self, by_prefix: Mapping[str, ErrorBody]) -> None:
        """by_prefix: of paths; the longest one that fits counts."""
        self._bodies = sorted(by_prefix.items(), key=lambda item: len(item[0]), reverse=True)

    def response(self, error: CaudalError, path: str) -> JSONResponse:
        """The answer to a request of `path` that fails with `error`."""
        api_error = to_api_error(error)
        body: ErrorBody = next((body for prefix, body in self._bodies if path.startswith(prefix)), ApiError.body)
        return JSONResponse(body(api_error), api_error.status, api_error.headers)


def to_api_error(error: CaudalError) -> ApiError:
    """The HTTP form of a typed error. Anything that is not the client's fault is 500."""
    message = str(error)
    match error:
        case ApiError():
            return error
        case RequestTooLongError():
            return ApiError(400, message, param=error.param, code="context_length_exceeded")
        case InvalidRequestError():
            return ApiError(400, message, param=error.param)
        case UnsupportedModelError():  # a valid request for something that this model cannot do
            return ApiError(400, message)
        case ModelNotFoundError():
            return ApiError(404, message, param="model", code="model_not_found")
        case QueueFullError():
            return ApiError(429, message, type="rate_limit_error", code="queue_full", headers={"Retry-After": "1"})
        case EngineDeadError():
            return unavailable(message)
        case _:
            return ApiError(500, message, type="server_error")


def unavailable(message: str, *, retry_after: int | None = None) -> ApiError:
    """503: the engine is loading, stopping or dead."""
    headers = None if retry_after is None else {"Retry-After": str(retry_after)}
    return ApiError(503, message, type="service_unavailable_error", code="service_unavailable", headers=headers)
