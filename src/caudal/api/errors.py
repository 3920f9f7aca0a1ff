"""Errors as HTTP sees them: one status, one OpenAI error body for each typed error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Scope

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
        self.request_id: str | None = None  # of the call that failed; known when it is answered

    def body(self) -> dict[str, Any]:
        """OpenAI's error object: `{"error": {"message", "type", "param", "code"}}`."""
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}


ErrorBody = Callable[[ApiError], Mapping[str, Any]]


class ErrorShapes:
    """Which calls are answered with which body for an error. OpenAI's is for all that no dialect claims."""

    def __init__(self, by_prefix: Mapping[str, ErrorBody], by_header: Mapping[str, ErrorBody]) -> None:
        """by_prefix: of paths; the longest one that fits counts. by_header: by the name of a header, in lower case,
        that only clients of one dialect send; for paths that no dialect claims."""
        self._by_prefix = sorted(by_prefix.items(), key=lambda item: len(item[0]), reverse=True)
        self._by_header = {name.encode(): body for name, body in by_header.items()}

    def response(self, error: CaudalError, scope: Scope) -> JSONResponse:
        """The answer to the call of `scope`, which fails with `error`."""
        api_error = to_api_error(error)
        api_error.request_id = request_id(scope)
        return JSONResponse(self._body(scope)(api_error), api_error.status, api_error.headers)

    def _body(self, scope: Scope) -> ErrorBody:
        for prefix, body in self._by_prefix:
            if scope["path"].startswith(prefix):
                return body
        for name, _ in scope["headers"]:
            if name in self._by_header:
                return self._by_header[name]
        return ApiError.body


def request_id(scope: Scope) -> str:
    """The id of a call: its client's own, or the gate's."""
    return scope["state"]["request_id"]


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


def invalid(param: str, message: str) -> ApiError:
    """400: a field that is not as it must be."""
    return ApiError(400, f"Invalid value for '{param}': {message}.", param=param, code="invalid_value")


def unsupported(param: str, what: str) -> ApiError:
    """400: a field that asks for something that Caudal would have to ignore."""
    return ApiError(400, f"{what} is not supported by this server.", param=param, code="unsupported_parameter")
