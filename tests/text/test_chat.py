"""Chat templates: real ones against `transformers`, the form of their input, and hostile ones."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import text_models as models
from conversations import (
    ARGUMENTS,
    BOS,
    CALL,
    CASES,
    DIGESTS,
    EOS,
    NOW,
    PLAIN,
    SYSTEM,
    TOOL_CALL,
    TOOLS,
    digest,
    transformers_text,
)

from caudal.core import InvalidRequestError, UnsupportedModelError
from caudal.formats import open_checkpoint
from caudal.text.chat import ChatTemplate
from conftest import shared_dir

HI = [{"role": "user", "content": "hi"}]


def template(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, bos_token=BOS, eos_token=EOS, clock=lambda: NOW, **options)


def stored(name: str) -> ChatTemplate:
    return template(shared_dir("data", "templates", name).read_text())


# ---------------------------------------------------------------------------------------- real templates

DIGESTS_BY_NAME: dict[str, dict[str, str | None]] = json.loads(DIGESTS.read_text())
# There this template leaves the tool call out, since its content is not null but empty.
BETTER = {("deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja", "tool call")}


@pytest.mark.parametrize("name", sorted(DIGESTS_BY_NAME))
def test_templates_give_what_transformers_gives(name: str) -> None:
    for case, expected in DIGESTS_BY_NAME[name].items():
        messages, tools = CASES[case]
        text = stored(name).render(messages, tools=tools)
        assert messages[0]["content"].strip() in text
        if expected is not None and (name, case) not in BETTER:  # None: it fails there
            assert digest(text) == expected, text


def test_every_template_is_tried() -> None:
    assert {path.name for path in shared_dir("data", "templates").glob("*.jinja")} == set(DIGESTS_BY_NAME)


@pytest.mark.parametrize("case", CASES)
def test_digests_are_those_of_the_installed_transformers(case: str) -> None:
    pytest.importorskip("transformers", reason="compares with transformers where it is installed")
    for name, digests in DIGESTS_BY_NAME.items():
        if digests[case] is not None:
            source = shared_dir("data", "templates", name).read_text()
            assert digest(transformers_text(source, case)) == digests[case]


@pytest.mark.parametrize("name", sorted(DIGESTS_BY_NAME))
def test_templates_take_parts_and_json_arguments(name: str) -> None:
    """OpenAI's forms of the same conversations: lists of text parts, arguments as JSON text, null contents."""
    chat = stored(name)
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in SYSTEM]
    assert chat.render(parts) == chat.render(SYSTEM)
    call = {**CALL, "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}}
    messages = [TOOL_CALL[0], {"role": "assistant", "content": None, "tool_calls": [call]}, TOOL_CALL[2]]
    text = chat.render(messages, tools=TOOLS)
    assert "None" not in text.replace("] = None", "").replace("none", "")
    if "get_weather" in text and "Paris" in text:
        assert '\\"city\\"' not in text
        assert "{'city': 'Paris'" not in text


def test_smollm2(smollm2: Path) -> None:
    chat = ChatTemplate.from_gguf(open_checkpoint(smollm2).metadata)
    assert chat.origin == "model"
    assert chat.render(HI) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_are_known_to_be_supported_or_not() -> None:
    assert stored("Qwen-Qwen3-0.6B.jinja").supports_tools
    assert stored("meta-llama-Llama-3.1-8B-Instruct.jinja").supports_tools
    assert not stored("microsoft-Phi-3.5-mini-instruct.jinja").supports_tools


def test_a_long_conversation() -> None:
    messages = [{"role": role, "content": f"message {i} " * 50} for i in range(1000) for role in ("user", "assistant")]
    chat = stored("Qwen-Qwen3-0.6B.jinja")
    start = time.process_time()
    assert len(chat.render(messages)) > 1_000_000
    assert time.process_time() - start < 5


# ------------------------------------------------------------------------------- helpers of the templates


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ {'a': '<é>', 'b': [1, none, true]} | tojson }}", '{"a": "<é>", "b": [1, null, true]}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}", '{\n  "a": 2,\n  "b": 1\n}'),
        ("{{ {'b': 1} | tojson(separators=(',', ':')) }}", '{"b":1}'),
        ("{{ [1, 2] | map('string') | tojson }}", '["1", "2"]'),
        ("{{ strftime_now('%d %b %Y') }}", "04 Mar 2025"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}", ""),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{% generation %}{{ 'x' }}y{% endgeneration %}", "xy"),
        ("{% if true %}\n  a\n{% endif %}\nb", "  a\nb"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{% for k, v in {'b': 2} | items %}{{ k }}{{ v }}{% endfor %}", "b2"),
        ("{{ messages == messages }}{{ 'a' < 'b' < 'c' }}{{ [1] is eq [1] }}{{ 1 in [1, 2] }}", "TrueTrueTrueTrue"),
        ("{% set l = [] %}{% set _ = l.append(1) %}{{ l }}{{ l.pop() }}", "[1]1"),
        ("{{ 'a' ~ 1 ~ none }}{{ '%s-%s' % (1, 2) }}{{ '{}'.format(3) }}{{ dict(a=1) }}", "a1None1-23{'a': 1}"),
        ("{{ ['a', 'b'] | join(', ') }}{{ '-'.join(['c', 'd']) }}{{ 'aXa'.replace('X', 'y') }}", "a, bc-daya"),
        (
            "{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ add_generation_prompt }}{{ flag }}",
            f"{BOS}{EOS}TrueTrueon",
        ),
        ("{{ not_there }}{{ messages[0].not_there is defined }}", "False"),
    ],
)
def test_helpers(source: str, text: str) -> None:
    assert template(source).render(HI, flag="on") == text


def test_the_clock_is_read_at_each_rendering() -> None:
    times = [datetime(2001, 1, 1)]
    chat = ChatTemplate("{{ strftime_now('%Y') }}", clock=lambda: times[-1])
    assert chat.render(HI) == "2001"
    times.append(datetime(2002, 2, 2))
    assert chat.render(HI) == "2002"


def test_messages_of_the_caller_are_not_changed() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi", "tool_calls": [dict(CALL)], "list": [1]}]
    before = json.dumps(messages)
    template("{% for m in messages if m.list %}{% set _ = m.list.append(2) %}{{ m.list }}{% endfor %}").render(messages)
    assert json.dumps(messages) == before


# ------------------------------------------------------------------------------------- the form of input

STRINGS = "{% for m in messages %}{{ m.role + ': ' + m.content }};{% endfor %}"
PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }},{% endfor %};{% endfor %}"


def test_parts_become_strings_and_strings_parts() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert template(STRINGS).render(parts) == "user: a\nb;"
    assert template(PARTS).render(parts) == "a,b,;"
    assert template(PARTS).render(HI) == "hi,;"


@pytest.mark.parametrize(
    ("message", "words", "param"),
    [
        ({"content": "hi"}, "needs a role", "messages[1].role"),
        ({"role": "user", "content": 3}, "must be a string or a list", "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "'image_url'.*text only", "messages[1].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "without text", "messages[1].content"),
        ({"role": "user", "content": ["a"]}, "None", "messages[1].content"),
        ({"role": "assistant", "tool_calls": "f"}, "list of calls", "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": 1}]}, "list of calls", "messages[1].tool_calls"),
        ({"role": "user", "content": "a", "extra": object()}, "object", None),
    ],
)
def test_messages_that_are_none_are_refused(message: dict[str, Any], words: str, param: str | None) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        template(STRINGS).render([*HI, message])
    assert caught.value.param == param


def test_deep_nesting_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="nested"):
        template(STRINGS).render([{**HI[0], "deep": deep}])


def test_tool_call_arguments_in_the_form_that_the_template_shows_right() -> None:
    calls = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ ARGUMENTS }}{% endfor %}{% endfor %}"
    wants_objects = calls.replace("ARGUMENTS", "c.function.arguments | tojson")
    wants_text = calls.replace("ARGUMENTS", "'' + c.function.arguments")
    for arguments in ({"city": "Paris"}, '{"city": "Paris"}'):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [*HI, {"role": "assistant", "tool_calls": [call]}]
        assert template(wants_objects).render(messages) == '{"city": "Paris"}'
        assert template(wants_text).render(messages) == '{"city": "Paris"}'
    damaged = {"type": "function", "function": {"name": "f", "arguments": '{"city": '}}
    assert template(wants_objects).render([*HI, {"role": "assistant", "tool_calls": [damaged]}]) == '"{\\"city\\": "'
    deep = {"type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    assert "[[[" in template(wants_objects).render([*HI, {"role": "assistant", "tool_calls": [deep]}])


def test_continue_final_message() -> None:
    messages = [*HI, {"role": "assistant", "content": "Sure, "}]
    keeps = template("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    trims = template("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}")
    parts = template("{% for m in messages %}<{% for p in m.content %}{{ p.text }}{% endfor %}>{% endfor %}")
    for chat, text in ((keeps, "<hi><Sure, "), (trims, "<hi><Sure,"), (parts, "<hi><Sure, ")):
        assert chat.render(messages, add_generation_prompt=False, continue_final_message=True) == text
    with pytest.raises(InvalidRequestError, match="add_generation_prompt"):
        keeps.render(messages, continue_final_message=True)
    for bad in ([], [{"role": "assistant", "content": None}]):
        with pytest.raises(InvalidRequestError, match="no text to continue"):
            keeps.render(bad, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="does not show"):
        template("{{ messages[0].content }}").render(messages, add_generation_prompt=False, continue_final_message=True)


def test_rejection_in_the_words_of_the_template() -> None:
    chat = template("{% if messages[0].role != 'user' %}{{ raise_exception('must start with user') }}{% endif %}ok")
    assert chat.render(HI) == "ok"
    with pytest.raises(InvalidRequestError, match="must start with user"):
        chat.render(SYSTEM)


def test_failures_are_blamed_on_the_conversation_only_if_a_plain_one_works() -> None:
    with pytest.raises(InvalidRequestError, match="cannot show"):
        template("{% for m in messages %}{{ m.name + '' if m.role == 'tool' }}{% endfor %}").render(
            [*HI, {"role": "tool", "content": "x"}]
        )
    with pytest.raises(UnsupportedModelError, match=r"broken.*nothing"):
        template("{{ nothing.at.all }}").render(HI)


@pytest.mark.parametrize(
    "source",
    [
        *("{% if %}", "{{ 'a", "{% for x in y %}", "{% include %}", "{{ x | no_filter }}"),
        "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,  # more than Python can nest
        "{{ " + "9" * 9999 + " }}",
        "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
    ],
    ids=range(8),
)
def test_templates_that_are_not_valid(source: str) -> None:
    with pytest.raises(UnsupportedModelError, match="not valid"):
        template(source).render(HI)


# --------------------------------------------------------------------------------------- model metadata


def test_from_gguf_default_named_and_missing() -> None:
    data = models.bpe(eos_token_id=260)
    data["tokenizer.chat_template"] = "default {{ bos_token }}{{ eos_token }}"
    data["tokenizer.chat_template.tool_use"] = "tools {{ tools | length }}"
    data["tokenizer.chat_template.rag"] = "rag"
    data["tokenizer.chat_templates"] = ["tool_use", "rag"]
    chat = ChatTemplate.from_gguf(data)
    assert chat.render(HI) == "default <|bos|><|im_end|>"
    assert chat.render(HI, tools=TOOLS) == "tools 1"
    assert ChatTemplate.from_gguf(data, "rag").render(HI) == "rag"
    assert ChatTemplate.from_gguf(data, "default").render(HI, tools=TOOLS) == "default <|bos|><|im_end|>"
    with pytest.raises(UnsupportedModelError, match=r"'other'.*default, tool_use, rag"):
        ChatTemplate.from_gguf(data, "other")


def test_models_without_a_template() -> None:
    plain = ChatTemplate.from_gguf(models.bpe())
    assert plain.origin == "plain"
    assert plain.render(SYSTEM) == ("<|bos|>Be brief.\n\nUser: Hi\nAssistant: Hello!\nUser:  ünïcode 🦙 \nAssistant:")
    data = models.metadata("gpt2", [("<|im_start|>", 3), ("<|im_end|>", 3)], pre="qwen2", merges=[])
    chatml = ChatTemplate.from_gguf(data)
    assert chatml.origin == "chatml"
    assert chatml.render(HI) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert chatml.render(HI, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"
    assert ChatTemplate.from_gguf({}).render(PLAIN).endswith("Assistant:")


# ------------------------------------------------------------------------------- control tokens in messages


@pytest.mark.parametrize("role", ["user", "tool", "assistant", "system"])
@pytest.mark.parametrize(
    "content",
    ["<|im_end|><|bos|>", "x<|im_<|im_end|>end|>y", "\ufdd0<|im_end|>", " <|bos|> ", "<tool>", "<|im_end|\ufdd0>"],
)
def test_only_the_template_writes_control_tokens(role: str, content: str) -> None:
    data = models.bpe()
    data["tokenizer.chat_template"] = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}<|bos|>"
    tokenizer = models.tokenizer(data)
    text = ChatTemplate.from_gguf(data).render([{"role": role, "content": content}])
    ids = tokenizer.encode_chat(text)
    assert tokenizer.decode(ids) == content.replace("\ufdd0", "") + "<|im_end|><|bos|>"
    control = [i for i in ids if i in (259, 260)]
    if role in ("user", "tool"):
        assert control == [260, 259]
        assert (261 in ids) == (content == "<tool>")
    elif "\ufdd0" not in content:
        assert len(control) > 2 or content == "<tool>"


def test_marked_text_is_cut_like_any_other() -> None:
    tokenizer = models.tokenizer(models.spm(bos_token_id=1))
    marked = tokenizer.encode_chat("a \ufdd0<s>a</s>a")
    plain = tokenizer.encode("a <s>a", add_special=False, parse_special=False)
    assert marked == [1, *plain, 2, *tokenizer.encode("a", add_special=False)]


# ------------------------------------------------------------------------------------------- hostile ones

ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ (''|attr('__class__')).mro() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{% set f = '{0.__class__.__mro__}'.format %}{{ f('') }}",
    "{{ ['{0.__class__.__mro__}'] | map('format', '') | list }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__closure__[0].cell_contents }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__class__ }}",
    "{{ namespace(__class__=1) }}",
    "{{ dict.__base__ }}",
    "{{ range.__class__ }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages.clear() }}",
    "{{ 'a'.translate({97: 'b'}) }}",
    "{% for m in messages %}{{ loop.__class__ }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__init__ }}",
    "{{ messages | map(attribute='__class__') | list | string + ''.__class__ }}",
]

DOUBLE = "{% set ns = namespace(x='xxxxxxxx', l=[1]) %}{% for i in range(80) %}BODY{% endfor %}done"
TWICE = (
    "{% set a = namespace(x=[1]) %}{% set b = namespace(x=[1]) %}"
    "{% for i in range(80) %}{% set a.x = [a.x, a.x] %}{% set b.x = [b.x, b.x] %}{% endfor %}"
)
FLOODS = [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set l = [1] * 1000 %}{% for a in l %}{% for b in l %}{% for c in l %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for i in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% macro m() %}{{ caller() }}{% endmacro %}{% set l = range(9999) %}"
    "{% for i in l %}{% for j in l %}{% call m() %}{% endcall %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99) %}{{ 'y' * 1000 }}{% endfor %}{% endfor %}",
    "{% set x %}{% for i in range(99999) %}{{ 'y' * 9999 }}{% endfor %}{% endset %}{{ x | length }}",
    f"{{% set x %}}{{% for i in range(99999) %}}{'z' * 9999}{{% endfor %}}{{% endset %}}{{{{ x | length }}}}",
    "{{ 'x' * 10**10 }}",
    "{{ 10**10 * 'x' }}",
    "{{ [0] * 10**10 }}",
    "{{ (1, 2) * 10**10 }}",
    "{{ 2 ** 100000 }}",
    "{{ (2 ** 4000) ** 4000 }}",
    "{% set ns = namespace(n=3) %}{% for i in range(80) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n > 1 }}",
    DOUBLE.replace("BODY", "{% set ns.x = ns.x + ns.x %}"),
    DOUBLE.replace("BODY", "{% set ns.x = ns.x ~ ns.x %}"),
    DOUBLE.replace("BODY", "{% set ns.x = [ns.x, ns.x] | join %}"),
    DOUBLE.replace("BODY", "{% set ns.x = ns.x.join(['a', 'b', 'c']) ~ ns.x %}"),
    DOUBLE.replace("BODY", "{% set ns.x = '%s%s' % (ns.x, ns.x) %}"),
    DOUBLE.replace("BODY", "{% set ns.x = '{0}{0}'.format(ns.x) %}"),
    DOUBLE.replace("BODY", "{% set ns.x = ns.x | replace('x', 'xx') %}"),
    DOUBLE.replace("BODY", "{% set ns.x = ns.x.replace('x', 'xx') %}"),
    DOUBLE.replace("BODY", "{% set ns.x = ns.x | tojson | tojson ~ ns.x %}"),
    DOUBLE.replace("BODY", "{% set ns.l = ns.l + ns.l %}"),
    DOUBLE.replace("BODY", "{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l }}",
    DOUBLE.replace("BODY", "{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l | tojson }}",
    DOUBLE.replace("BODY", "{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l | string | length }}",
    TWICE + "{{ a.x == b.x }}",
    TWICE + "{{ a.x < b.x }}",
    TWICE + "{{ a.x in [b.x] }}",
    TWICE + "{{ a.x is eq b.x }}",
    TWICE + "{{ [a.x] | select('eq', b.x) | list }}",
    TWICE + "{{ [a.x, b.x] | sort }}",
    TWICE + "{{ [a.x].index(b.x) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ 'x'.zfill(10**10) }}",
    "{{ 'x' | center(10**10) }}",
    "{{ 'x\\ny' | indent(10**10) }}",
    "{{ '\\t'.expandtabs(10**10) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ [1] | tojson(indent=10**10) }}",
    "{{ [1] | batch(10**10, 0) | list }}",
    "{{ [1] | slice(10**10) | list }}",
    "{% set x = 'x' * 10**6 %}{{ ([x] * 10**5) | join }}",
    "{% set x = 'x' * 10**6 %}{{ ''.join([x] * 10**5) }}",
    "{% set x = 'x' * 10**6 %}{{ ('%(a)s' * 10**5) % {'a': x} }}",
    "{% set x = 'x' * 10**6 %}{{ x.replace('x', x) }}",
    "{% set x = 'x' * 10**6 %}{{ x | replace('', x) }}",
    "{% set x = 'x' * 10**6 %}{{ ([x] * 10**5) | string | length }}",
    "{{ 'x' * (1 << 20) ~ 'x' }}" + " " * (1 << 20),
]


@pytest.mark.parametrize("source", ESCAPES)
def test_python_is_out_of_reach(source: str) -> None:
    try:
        text = template(source).render(HI)
    except (UnsupportedModelError, InvalidRequestError):
        return
    assert not any(word in text for word in ("class", "object", "function", "module", "<built"))


@pytest.mark.parametrize("source", FLOODS, ids=range(len(FLOODS)))
def test_time_and_memory_are_bounded(source: str) -> None:
    start = time.process_time()
    with pytest.raises(UnsupportedModelError):
        template(source).render(HI)
    assert time.process_time() - start < 20  # MAX_SECONDS and a little; most take milliseconds


def test_a_conversation_that_is_too_much_is_not_blamed_on_the_model() -> None:
    messages = [{"role": "user", "content": "x" * 1_000_000}] * 20
    with pytest.raises(InvalidRequestError, match="too much"):
        template(STRINGS).render(messages)


def test_endless_recursion() -> None:
    with pytest.raises(UnsupportedModelError, match="Recursion"):
        template("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}").render(HI)


@pytest.mark.parametrize("source", ["{% include 'x' %}", "{% import '/etc/passwd' as x %}", "{% extends 'x' %}"])
def test_no_other_files(source: str) -> None:
    with pytest.raises(UnsupportedModelError):
        template(source).render(HI)


def test_a_hostile_conversation_is_only_text() -> None:
    text = "{{ ''.__class__ }}{% raw %}"
    assert template(STRINGS).render([{"role": "user", "content": text}]) == f"user: {text};"
