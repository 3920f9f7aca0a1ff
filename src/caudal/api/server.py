"""The application that holds all dialects, and the server that runs it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import ipaddress
import math
import pkgutil
import signal
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from types import FrameType, ModuleType

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

import caudal.api
from caudal import __version__
from caudal.api.errors import ApiError, ErrorBody, ErrorShapes, ListenError
from caudal.api.http import ClientGoneError
from caudal.api.middleware import LOOPBACK_NAMES, Gate
from caudal.api.protocol import BoundedHeadProtocol
from caudal.api.service import ServedModel, Service
from caudal.config import ServerConfig
from caudal.core import CaudalError, InvalidSettingError

KEEP_ALIVE = 60  # seconds that an idle connection stays open
MAX_DRAIN_TIMEOUT = 24 * 3600  # seconds
ABORT_SECONDS = 3  # after the drain timeout, for aborted requests to send their ends
CLIENT_GONE = 499  # nobody reads it; the number is nginx's


def dialects() -> Iterator[ModuleType]:
    """Every module in this package that has a function `router`: its routes for a `Service`. A dialect whose errors
    have a shape of their own has `ERROR_BODIES`, too: their bodies by the prefix of a path; and `ERROR_HEADERS`, where
    a header tells its clients on routes that others have as well."""
    for info in pkgutil.iter_modules(caudal.api.__path__, "caudal.api."):
        module = importlib.import_module(info.name)
        if hasattr(module, "router"):
            yield module


def create_app(service: Service, config: ServerConfig) -> FastAPI:
    """The application: all dialects behind one gate, every error in its dialect's shape.

    It serves what `service` has; before `Service.set_model` and after `Service.stop` routes answer 503.
    """
    app = FastAPI(
        title="Caudal",
        version=__version__,
        docs_url=None,  # they would load scripts from another host
        redoc_url=None,
        redirect_slashes=False,
    )
    by_prefix: dict[str, ErrorBody] = {}
    by_header: dict[str, ErrorBody] = {}
    for dialect in dialects():
        app.include_router(dialect.router(service))
        by_prefix |= getattr(dialect, "ERROR_BODIES", {})
        by_header |= getattr(dialect, "ERROR_HEADERS", {})
    errors = ErrorShapes(by_prefix, by_header)
    app.add_middleware(
        Gate,
        api_key=config.api_key,
        hosts=LOOPBACK_NAMES | {config.host.strip("[]").lower()} if is_loopback(config.host) else None,
        origins=config.allowed_origins,
        max_request_bytes=config.max_request_bytes,
        errors=errors,
    )
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=config.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )

    async def on_caudal_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, CaudalError)
        return errors.response(error, request.scope)

    async def on_http_error(request: Request, error: Exception) -> Response:
        """What the router finds: no such path, or not with this method."""
        assert isinstance(error, HTTPException)
        path = request.scope["path"]
        messages = {404: f"Unknown route: {request.method} {path}", 405: f"{path} does not take {request.method}"}
        message = messages.get(error.status_code, str(error.detail))
        return errors.response(ApiError(error.status_code, message, headers=error.headers), request.scope)

    app.add_exception_handler(CaudalError, on_caudal_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    return app


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


# ---------------------------------------------------------------------------------------------- sockets


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this computer only."""
    if host.lower() == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def bind(config: ServerConfig) -> socket.socket:
    """A socket that has the configured address, not yet listening. Raises `ListenError`."""
    if not (is_loopback(config.host) or config.api_key or config.insecure):
        raise ListenError(
            f"{config.host} can be reached from other computers. Set a key with --api-key, "
            "or pass --insecure to let everybody in."
        )
    if config.api_key == "":
        raise ListenError("The API key is empty. Leave --api-key out to need none.")
    where = f"{config.host}:{config.port}"
    if not 0 <= config.port < 65536:
        raise ListenError(f"Cannot listen on {where}: ports go from 0 to 65535.")
    try:
        found = socket.getaddrinfo(
            config.host.strip("[]"), config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError, OverflowError) as error:
        raise ListenError(f"Cannot listen on {where}: unknown host ({error}).") from error
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)  # of both, clients try IPv4 at the latest
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # also beside connections that are closing
        sock.bind(address)
        sock.listen()  # now, as two sockets may bind one port as long as none listens
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ListenError(f"Port {config.port} is in use. Choose another one with --port, or 0 for any.") from error
        raise ListenError(f"Cannot listen on {where}: {error.strerror}.") from error
    return sock


# ----------------------------------------------------------------------------------------------- serving


class _Server(uvicorn.Server):
    """uvicorn, told to stop by SIGINT and SIGTERM and then to return, so that the process ends with status 0."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_timeout: float) -> None:
        super().__init__(config)
        self._service = service
        self._drain_timeout = drain_timeout

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread gets signals
            return
        previous = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in previous.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets running requests finish; a second SIGINT does not."""
        self._service.stop()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Requests that are not over after `drain_timeout` seconds are aborted, so that their streams end properly."""
        timer = asyncio.get_running_loop().call_later(self._drain_timeout, self._service.abort)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    """How Caudal runs uvicorn: no access log, no trust in proxy headers, bounded request heads."""
    return uvicorn.Config(
        app,
        http=BoundedHeadProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=math.ceil(config.drain_timeout) + ABORT_SECONDS,
    )


def serve(load: Callable[[], ServedModel], config: ServerConfig, report: Callable[[str], None]) -> None:
    """Listens, loads the model, and serves it until SIGINT or SIGTERM; then drains and returns.

    The port is taken first, so that a port in use costs no loading; until the model is there, /health answers 503.
    `report` is called with what goes on, and with `Listening on http://HOST:PORT` once requests are served. Call it
    from the main thread, which gets the signals. Raises `ListenError`, `InvalidSettingError` or what `load` raises.
    """
    if not 0 <= config.drain_timeout <= MAX_DRAIN_TIMEOUT:
        raise InvalidSettingError(f"drain_timeout must be 0 to {MAX_DRAIN_TIMEOUT} seconds, not {config.drain_timeout}")
    sock = bind(config)
    service = Service()
    server_config = uvicorn_config(create_app(service, config), config)
    server = _Server(server_config, service, config.drain_timeout)
    with sock, asyncio.Runner(loop_factory=server_config.get_loop_factory()) as runner:
        runner.run(_serve(server, service, sock, load, report))


async def _serve(
    server: _Server,
    service: Service,
    sock: socket.socket,
    load: Callable[[], ServedModel],
    report: Callable[[str], None],
) -> None:
    host, port = sock.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        while not (server.started or serving.done()):  # from then on signals and /health are answered
            await asyncio.sleep(0.01)
        report("Loading the model")
        model = await asyncio.to_thread(load)
        try:
            service.set_model(model)
            if not server.should_exit:
                report(f"Listening on {url}")
            await serving
        finally:
            await asyncio.to_thread(model.engine.close)
    finally:
        server.should_exit = True
        await serving
