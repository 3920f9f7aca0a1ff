"""Conversations of typed blocks in the templates of real models."""

from __future__ import annotations

import asyncio

from caudal.api import anthropic_requests, responses_requests
from caudal.api.openai_requests import ChatBody, normalize_messages
from caudal.text.chat import ChatTemplate
from conftest import shared_dir

MESSAGES = anthropic_requests.PromptBody.model_validate(
    {
        "system": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
        "tools": [{"name": "weather", "input_schema": {}}],
        "messages": [
            {"role": "user", "content": "Rain there?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "A thought.", "signature": "s"},
                    {"type": "tool_use", "id": "call00001", "name": "weather", "input": {"city": "Vigo"}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "call00001", "content": "a drizzle"}],
            },
        ],
    }
)
RESPONSES = responses_requests.ResponsesBody.model_validate(
    {
        "instructions": "Be brief.\nBe kind.",
        "tools": [{"type": "function", "name": "weather"}],
        "input": [
            {"role": "user", "content": "Rain there?"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "A thought."}]},
            {"type": "function_call", "call_id": "call00001", "name": "weather", "arguments": '{"city": "Vigo"}'},
            {"type": "function_call_output", "call_id": "call00001", "output": "a drizzle"},
        ],
    }
)


def rendered(source: str, body: ChatBody) -> str:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    return template.render(normalize_messages(body.messages), tools=body.tools)


def test_every_template_shows_both_in_the_same_way() -> None:
    """Also tools of which nothing but the name is given; and no template fails."""
    sources = {path.name: path.read_text() for path in shared_dir("data", "templates").glob("*.jinja")}
    assert len(sources) > 30
    bodies = [
        asyncio.run(anthropic_requests.chat_body(MESSAGES)),
        asyncio.run(responses_requests.chat_body(RESPONSES)),
    ]
    for name, source in sources.items():
        texts = [rendered(source, body) for body in bodies]
        assert "Rain there?" in texts[0], name
        # templates that want parts join the two of `system` in their own way
        assert texts[0].replace("brief.Be", "brief.\nBe").split() == texts[1].split(), name
    qwen = rendered(sources["Qwen-Qwen3-0.6B.jinja"], bodies[0])
    shown = ("Be brief.\nBe kind.", '"name": "weather"', "<think>\nA thought.", '{"city": "Vigo"}', "a drizzle")
    assert [text for text in shown if text not in qwen] == []
