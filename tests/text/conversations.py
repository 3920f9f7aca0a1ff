"""Conversations that the chat templates are tried with, and what `transformers` makes of them.

Run as a program where `transformers` is installed, this writes the digests of its texts to `rendered.json`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

Conversation = list[dict[str, Any]]

NOW = datetime(2025, 3, 4, 5, 6, 7)
BOS, EOS = "<BOS>", "<EOS>"
DIGESTS = Path(__file__).parent / "rendered.json"

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Name <of> the city, é"},
        "unit": {"type": "string", "enum": ["c", "f"], "description": "Unit"},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Get it", "parameters": PARAMETERS}},
]
ARGUMENTS = {"city": "Paris"}
PLAIN: Conversation = [{"role": "user", "content": "Hello <there> & 'you'\n  two"}]
SYSTEM: Conversation = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": " ünïcode 🦙 "},
]
CALL = {"id": "call12345", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
TOOL_CALL: Conversation = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": "18 C"},
]
CASES: dict[str, tuple[Conversation, list[dict[str, Any]] | None]] = {
    "plain": (PLAIN, None),
    "system": (SYSTEM, None),
    "tools": (PLAIN, TOOLS),
    "tool call": (TOOL_CALL, TOOLS),
}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def transformers_text(source: str, case: str) -> str:
    """Raises whatever the template runs into there."""
    from transformers.utils import chat_template_utils

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return NOW

    chat_template_utils.datetime = Clock
    messages, tools = CASES[case]
    texts, _ = chat_template_utils.render_jinja_template(
        [messages], tools=tools, chat_template=source, add_generation_prompt=True, bos_token=BOS, eos_token=EOS
    )
    return texts[0]


def main(folder: Path) -> None:
    digests: dict[str, dict[str, str | None]] = {}
    for path in sorted(folder.glob("*.jinja")):
        digests[path.name] = {}
        for case in CASES:
            try:
                digests[path.name][case] = digest(transformers_text(path.read_text(), case))
            except Exception as error:  # noqa: BLE001  (templates fail in any way)
                print(f"{path.name}, {case}: {type(error).__name__}: {error}")
                digests[path.name][case] = None
    DIGESTS.write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
