"""The gate in front of every route: who may call, from where, and how much they may send."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from caudal.api.errors import ApiError, ErrorShapes

_log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/v1/health", "/ping"})  # need no key: load balancers have none
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class BodyTooLargeError(ApiError):
    def __init__(self, limit: int) -> None:
        super().__init__(
            413,
            f"The request body is larger than {limit} bytes, the limit of this server.",
            code="request_too_large",
            headers={"Connection": "close"},  # the rest of the body is not read
        )


class Gate:
    """Pure ASGI middleware: request ids, Host and Origin, API key, body size; and the last resort for errors.

    `api_key`: the key that clients must send as `Authorization: Bearer KEY` or `x-api-key: KEY`; None: no key.
    `hosts`: names by which the server may be addressed; None: any. A web page of somebody else can reach a
    server on loopback through a name that it makes point to 127.0.0.1 (DNS rebinding), or just by its address
    (cross-site request); its browser then sends that name in Host, or the page's own in Origin.
    `origins`: web pages that may call although their host is not in `hosts`; "*": all.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        hosts: frozenset[str] | None,
        origins: Iterable[str],
        max_request_bytes: int,
        errors: ErrorShapes,
    ) -> None:
        self._app = app
        self._key_digest = None if api_key is None else hashlib.sha256(api_key.encode()).digest()
        self._hosts = hosts
        self._origins = frozenset(origins)
        self._max_request_bytes = max_request_bytes
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        limit = self._max_request_bytes
        received = 0
        started = False

        async def bounded_receive() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > limit:
                    raise BodyTooLargeError(limit)
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                ids = [(b"x-request-id", request_id), (b"request-id", request_id)]  # OpenAI's name and Anthropic's
                message["headers"] = [*message.get("headers", ()), *ids]
            await send(message)

        try:
            self._check(scope, headers)
            await self._app(scope, bounded_receive, send_with_id)
        except ApiError as error:
            await self._errors.response(error, scope)(scope, receive, send_with_id)
        except Exception:
            if started:
                raise  # uvicorn logs it and closes the connection, by which the client sees that something is missing
            _log.exception("request %s failed", request_id.decode())
            # the details go to the log only: they may hold what other people asked
            error = ApiError(500, "Internal error. The server's log says more.", type="server_error")
            await self._errors.response(error, scope)(scope, receive, send_with_id)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if self._hosts is not None:
            self._check_source(headers, self._hosts)
        if self._key_digest is not None and scope["path"] not in OPEN_PATHS:
            keys = _sent_keys(headers)
            # digests are compared, so that the time tells nothing about the key, not even its length
            if not any(hmac.compare_digest(hashlib.sha256(key).digest(), self._key_digest) for key in keys):
                raise ApiError(
                    401,
                    "Incorrect API key provided."
                    if keys
                    else "No API key provided: send `Authorization: Bearer KEY` or `x-api-key: KEY`.",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        length = headers.get(b"content-length", b"0").lstrip(b"0")
        if len(length) > 18 or int(length or b"0") > self._max_request_bytes:  # the HTTP parser made sure of digits
            raise BodyTooLargeError(self._max_request_bytes)

    def _check_source(self, headers: dict[bytes, bytes], hosts: frozenset[str]) -> None:
        host = headers.get(b"host", b"").decode("latin-1")
        if host_name(f"//{host}") not in hosts:
            raise ApiError(
                403,
                f"The host {host!r} is not a name of this server. It listens on this computer only.",
                type="permission_error",
                code="host_not_allowed",
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and not {origin, "*"} & self._origins and host_name(origin) not in hosts:
            raise ApiError(
                403,
                f"Web pages of {origin!r} may not call this server. Its owner can allow them with --allowed-origins.",
                type="permission_error",
                code="origin_not_allowed",
            )


def _sent_keys(headers: dict[bytes, bytes]) -> list[bytes]:
    """The keys in OpenAI's header and in Anthropic's; programs with a key for each server may send both."""
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    keys = [bearer.strip() if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"").strip()]
    return [key for key in keys if key]


def host_name(url: str) -> str | None:
    """The host in an URL in lower case, without port and brackets; None if it has none or is malformed."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
