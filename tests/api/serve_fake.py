"""A server process with a scripted engine, for tests of starting and stopping.

python serve_fake.py '{"host": "127.0.0.1", ...}' LOAD_SECONDS TOKEN_DELAY
"""

from __future__ import annotations

import json
import sys
import time

from fake import FakeEngine, fake_model

from caudal.api.server import serve
from caudal.api.service import ServedModel
from caudal.config import ServerConfig
from caudal.core import CaudalError


def main() -> int:
    settings, load_seconds, delay = json.loads(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])

    def report(line: str) -> None:
        print(line, flush=True)

    engine = FakeEngine(delay=delay, max_model_len=10**9)

    def load() -> ServedModel:
        time.sleep(abs(load_seconds))
        if load_seconds < 0:
            raise CaudalError("no such model")
        return fake_model(engine)

    try:
        serve(load, ServerConfig(**settings), report)
    except CaudalError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 1
    report(f"closed {engine.closed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
