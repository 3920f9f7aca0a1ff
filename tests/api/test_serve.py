"""Starting and stopping: the port, the ready line, health before and after, draining, exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from caudal.api.errors import ListenError
from caudal.api.server import bind, is_loopback
from caudal.config import ServerConfig

HERE = Path(__file__).resolve().parent


class Process:
    """A server process and what it prints."""

    def __init__(self, settings: dict[str, Any], load_seconds: float, delay: float) -> None:
        paths = [str(HERE.parent.parent / "src"), str(HERE), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "serve_fake.py"), json.dumps(settings), str(load_seconds), str(delay)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def url(self) -> str:
        """Waits until the server is ready."""
        while not (line := self.line()).startswith("Listening on "):
            assert line, self.process.communicate()[1]
        return line.removeprefix("Listening on ")

    def end(self) -> tuple[int, str, str]:
        """Exit status, the rest of its output, its errors."""
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


@contextlib.contextmanager
def server(load_seconds: float = 0.0, delay: float = 0.0, **settings: Any) -> Iterator[Process]:
    process = Process({"port": 0, **settings}, load_seconds, delay)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.communicate()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_ready_line_health_and_sigterm() -> None:
    with server() as process:
        url = process.url()
        assert url.startswith("http://127.0.0.1:")
        assert httpx.get(f"{url}/health").status_code == 200
        process.process.send_signal(signal.SIGTERM)
        assert process.end() == (0, "closed True\n", "")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def test_health_says_503_until_the_model_is_there() -> None:
    port = free_port()
    with server(load_seconds=1.5, port=port) as process:
        assert process.line() == "Loading the model"
        url = f"http://127.0.0.1:{port}"
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503
        assert health.headers["retry-after"] == "1"
        assert "loading" in health.json()["error"]["message"]
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 503
        assert httpx.get(f"{url}/v1/models").status_code == 503
        assert process.url() == url
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_stream_that_runs_is_finished(sig: signal.Signals) -> None:
    with server(delay=0.02) as process:
        url = process.url()
        body = {"prompt": "x", "max_tokens": 60, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.process.send_signal(sig)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert process.end()[0] == 0


def test_idle_connections_do_not_hold_it_up() -> None:
    with server() as process, httpx.Client() as client:
        url = process.url()
        assert client.get(f"{url}/health").status_code == 200
        start = time.monotonic()
        process.process.send_signal(signal.SIGTERM)
        assert process.end()[0] == 0
        assert time.monotonic() - start < 15  # far from the minute for which connections are kept


def test_draining_has_an_end() -> None:
    with server(delay=0.01, drain_timeout=0.5) as process:
        url = process.url()
        body = {"prompt": "x", "max_tokens": 10**8, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as reply:
            lines = reply.iter_lines()
            next(lines)
            start = time.monotonic()
            process.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
        assert process.end() == (0, "closed True\n", "")
        assert time.monotonic() - start >= 0.5


def test_draining_does_not_wait_for_a_request_that_never_comes_whole() -> None:
    with server(drain_timeout=0.5) as process:
        host, port = process.url().removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(0.2)
            start = time.monotonic()
            process.process.send_signal(signal.SIGTERM)
            assert process.end()[:2] == (0, "closed True\n")
            assert time.monotonic() - start < 15


def test_sigterm_while_loading() -> None:
    with server(load_seconds=1.0) as process:
        assert process.line() == "Loading the model"
        process.process.send_signal(signal.SIGTERM)
        assert process.end()[:2] == (0, "closed True\n")  # and never said that it listens


def test_a_model_that_does_not_load() -> None:
    with server(load_seconds=-0.1) as process:
        assert process.end() == (1, "Loading the model\nCaudalError: no such model\n", "")


def test_port_in_use_is_found_before_loading() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        with server(port=port) as process:
            status, out, _ = process.end()
    assert status == 1
    assert out == f"ListenError: Port {port} is in use. Choose another one with --port, or 0 for any.\n"


def test_port_can_be_taken_again_at_once() -> None:
    port = free_port()
    for _ in range(2):
        with server(port=port) as process, httpx.Client() as client:
            assert client.get(f"{process.url()}/health").status_code == 200
            process.process.send_signal(signal.SIGTERM)
            assert process.end()[0] == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.invalid", ""])
def test_other_addresses_need_a_key(host: str) -> None:
    with pytest.raises(ListenError, match="--api-key"):
        bind(ServerConfig(host=host, port=0))


@pytest.mark.parametrize("extra", [{"api_key": "k"}, {"insecure": True}])
def test_other_addresses_with_a_key(extra: dict[str, Any]) -> None:
    with bind(ServerConfig(host="0.0.0.0", port=0, **extra)) as sock:
        assert sock.getsockname()[1] > 0


@pytest.mark.parametrize("host", ["example.invalid", "192.0.2.1", "a" * 300, "\x00"])
def test_addresses_that_are_not_ours(host: str) -> None:
    with pytest.raises(ListenError, match="Cannot listen on"):
        bind(ServerConfig(host=host, port=0, insecure=True))


@pytest.mark.parametrize("port", [-1, 65536, 10**10])
def test_ports_that_do_not_exist(port: int) -> None:
    with pytest.raises(ListenError, match="65535"):
        bind(ServerConfig(port=port))


@pytest.mark.parametrize("extra", [{}, {"insecure": True}, {"host": "0.0.0.0"}])
def test_an_empty_key_is_refused(extra: dict[str, Any]) -> None:
    """It is what is left of `--api-key "$KEY"` when KEY is not set."""
    with pytest.raises(ListenError):
        bind(ServerConfig(port=0, api_key="", **extra))


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("2130706433", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback
