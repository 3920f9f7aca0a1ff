"""The /commands of a chat, without a model or a terminal."""

from __future__ import annotations

import json

import pytest

from caudal.cli.support.conversation import COMMANDS, Conversation, obey
from caudal.core import SamplingParams
from caudal.engine.sampling import validate


def check(params):
    validate(params, vocab_size=1000, max_model_len=100)


@pytest.fixture
def talk():
    conversation = Conversation(SamplingParams(), check, model="m")
    for question, answer in (("one?", "1"), ("two?", "2")):
        conversation.ask(question)
        conversation.answer(answer)
    return conversation


def test_help_names_every_command(talk):
    text = obey(talk, "/help").text
    assert all(f"/{name}" in text for name in COMMANDS)
    assert "Ctrl-C" in text


def test_unknown_command_changes_nothing(talk):
    before = talk.messages
    assert "/help" in obey(talk, "/halp").text
    assert talk.messages == before


def test_system_prompt(talk):
    obey(talk, "/system Be brief. ")
    assert talk.messages[0] == {"role": "system", "content": "Be brief."}
    assert obey(talk, "/system").text == "Be brief."
    obey(talk, "/system none")
    assert talk.messages[0]["role"] == "user"


def test_set(talk):
    assert obey(talk, "/set temperature 0.5").text == "temperature = 0.5"
    assert talk.params.temperature == 0.5
    assert "temperature = 0.5" in obey(talk, "/set").text
    for wrong in ("/set temperature hot", "/set temperature -1", "/set heat 2"):
        assert obey(talk, wrong).text
    assert talk.params == SamplingParams(temperature=0.5)
    assert obey(talk, "/set stop END").text == "stop = END"
    assert obey(talk, "/set stop none").text == "stop = none"
    assert "max_tokens = none" in obey(talk, "/set").text


def test_regenerate_asks_the_last_question_again(talk):
    assert obey(talk, "/regenerate").regenerate
    assert talk.turns[-1] == {"role": "user", "content": "two?"}
    talk.turns.clear()
    assert not obey(talk, "/regenerate").regenerate


def test_an_answer_stays_if_its_replacement_does_not_come(talk):
    before = talk.messages
    obey(talk, "/regenerate")
    talk.drop_question()
    assert talk.messages == before
    talk.ask("three?")
    talk.drop_question()
    assert talk.messages == before


def test_save_and_load(talk, tmp_path):
    obey(talk, "/system Be brief.")
    file = tmp_path / "talk.json"
    assert str(file) in obey(talk, f"/save {file}").text
    assert json.loads(file.read_text())["model"] == "m"
    other = Conversation(SamplingParams(), check)
    obey(other, f"/load {file}")
    assert other.messages == talk.messages


@pytest.mark.parametrize("content", ["", "{}", '{"messages": [1]}', "\xff"])
def test_load_refuses_other_files(talk, tmp_path, content):
    file = tmp_path / "x"
    file.write_text(content, encoding="latin-1")
    before = talk.messages
    assert "not a saved conversation" in obey(talk, f"/load {file}").text
    assert talk.messages == before
    assert obey(talk, "/load /nowhere/at/all").text == "/nowhere/at/all: No such file or directory"


def test_clear_and_exit(talk):
    obey(talk, "/clear")
    assert talk.messages == []
    assert obey(talk, "/exit").leave
    assert obey(talk, "/bye").leave


def test_the_oldest_turns_go_first(talk):
    talk.ask("three?")
    assert talk.drop_oldest()
    assert [m["content"] for m in talk.messages] == ["two?", "2", "three?"]
    assert talk.drop_oldest()
    assert not talk.drop_oldest()
