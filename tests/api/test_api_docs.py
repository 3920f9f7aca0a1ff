"""The examples of docs/api.md work, and its tables name every field."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake import running

from caudal.api.anthropic_requests import MessagesBody
from caudal.api.openai_requests import ChatBody, CompletionBody
from caudal.api.responses_requests import ResponsesBody

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_examples_run() -> None:
    with running() as server:

        def local(code: str) -> str:
            return code.replace("http://127.0.0.1:8000", server.url).replace("smollm2:135m", "fake")

        for code in blocks("python"):
            done = subprocess.run([sys.executable, "-c", local(code)], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            assert done.stdout.startswith("Hello")
        if shutil.which("curl") is None:
            pytest.skip("needs curl")
        commands = [code for code in blocks("sh") if code.startswith("curl")]
        assert commands
        for code in commands:
            script = local(code).replace("curl ", "curl --fail-with-body --silent ")
            done = subprocess.run(["sh", "-e", "-c", script], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr


def test_every_field_is_documented() -> None:
    bodies = (CompletionBody, ChatBody, MessagesBody, ResponsesBody)
    fields = {name for body in bodies for name in body.model_fields} - {"response_format", "best_of"}
    rows = "\n".join(line.split("|")[1] for line in TEXT.splitlines() if line.startswith("| `"))
    assert [name for name in sorted(fields) if f"`{name}`" not in rows] == []
