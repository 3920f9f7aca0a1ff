"""A conversation with a model and the commands that steer it, apart from any terminal."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import click

from caudal.cli.support.errors import describe
from caudal.cli.support.options import SAMPLING_HELP, parse_sampling
from caudal.core import SamplingParams

Message = dict[str, str]  # role: system, user or assistant; content


@dataclass(slots=True)
class Conversation:
    """What was said so far, and how answers are sampled."""

    params: SamplingParams
    check: Callable[[SamplingParams], None]  # raises InvalidRequestError for values out of range
    model: str = ""
    system: str = ""
    turns: list[Message] = field(default_factory=list[Message])  # user and assistant in turn
    _replaced: Message | None = field(default=None, init=False)  # the answer that is being given anew

    @property
    def messages(self) -> list[Message]:
        """What the chat template gets."""
        head: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})
        self._replaced = None

    def answer(self, text: str) -> None:
        self.turns.append({"role": "assistant", "content": text})
        self._replaced = None

    def drop_answer(self) -> bool:
        """Forget the last answer, so that its question is the last turn. False if there is none."""
        if self.turns and self.turns[-1]["role"] == "assistant":
            self._replaced = self.turns.pop()
        return bool(self.turns)

    def drop_question(self) -> None:
        """Forget a question that got no answer; one that was asked again keeps the answer that it had."""
        if self._replaced is not None:
            self.answer(self._replaced["content"])
        elif self.turns and self.turns[-1]["role"] == "user":
            self.turns.pop()

    def drop_oldest(self) -> bool:
        """Forget the first question and its answer. False if only the last question is left."""
        if len(self.turns) < 3:
            return False
        del self.turns[:2]
        return True

    def save(self, path: Path) -> None:
        content = {"model": self.model, "messages": self.messages}
        path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")

    def load(self, path: Path) -> None:
        """Continue a saved conversation. Raises ValueError if the file is none."""
        try:
            messages = [
                {"role": str(m["role"]), "content": str(m["content"])}
                for m in json.loads(path.read_text("utf-8"))["messages"]
            ]
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a saved conversation") from error
        self.system = "".join(m["content"] for m in messages if m["role"] == "system")
        self.turns = [m for m in messages if m["role"] != "system"]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a /command wants: something printed, another answer, or the end."""

    text: str = ""
    regenerate: bool = False
    leave: bool = False


@dataclass(frozen=True, slots=True)
class SlashCommand:
    usage: str
    help: str
    run: Callable[[Conversation, str], Reply]


def _help(conversation: Conversation, argument: str) -> Reply:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"  {command.usage:<{width}}  {command.help}" for command in COMMANDS.values()]
    keys = "\n  Ctrl-C stops an answer, Ctrl-D leaves, Alt-Enter starts a new line, the up arrow brings old lines."
    return Reply("\n".join(lines) + "\n" + keys)


def _system(conversation: Conversation, argument: str) -> Reply:
    if not argument:
        return Reply(conversation.system or "There is no system prompt.")
    conversation.system = "" if argument == "none" else argument
    return Reply("System prompt set." if conversation.system else "System prompt removed.")


def _set(conversation: Conversation, argument: str) -> Reply:
    name, _, value = argument.partition(" ")
    if not name:
        rows = [f"  {name} = {_shown(getattr(conversation.params, name))}" for name in SAMPLING_HELP]
        return Reply("\n".join(rows))
    name = name.replace("-", "_")
    if not value.strip():
        return Reply(f"{name}: {SAMPLING_HELP[name]}" if name in SAMPLING_HELP else f"There is no setting {name}.")
    changed = dataclasses.replace(conversation.params, **{name: parse_sampling(name, value.strip())})  # type: ignore[arg-type]
    conversation.check(changed)
    conversation.params = changed
    return Reply(f"{name} = {_shown(getattr(changed, name))}")


def _shown(value: object) -> str:
    """A setting's value, as /set takes it."""
    if isinstance(value, tuple):
        return " ".join(cast("tuple[str, ...]", value)) or "none"
    return "none" if value is None else str(value)


def _regenerate(conversation: Conversation, argument: str) -> Reply:
    if not conversation.drop_answer():
        return Reply("There is no answer yet.")
    return Reply(regenerate=True)


def _save(conversation: Conversation, argument: str) -> Reply:
    if not argument:
        return Reply("Where to? /save FILE")
    path = Path(argument).expanduser()
    conversation.save(path)
    return Reply(f"Saved to {path}.")


def _load(conversation: Conversation, argument: str) -> Reply:
    if not argument:
        return Reply("What? /load FILE")
    conversation.load(Path(argument).expanduser())
    return Reply(f"Loaded {len(conversation.turns)} turns.")


def _clear(conversation: Conversation, argument: str) -> Reply:
    conversation.turns.clear()
    return Reply("Forgotten. The system prompt stays.")


def _exit(conversation: Conversation, argument: str) -> Reply:
    return Reply(leave=True)


COMMANDS = {
    "help": SlashCommand("/help", "show this list", _help),
    "system": SlashCommand("/system [TEXT|none]", "show, set or remove the system prompt", _system),
    "set": SlashCommand(
        "/set [NAME [VALUE]]", "show or change how answers are sampled, e.g. /set temperature 0.7", _set
    ),
    "regenerate": SlashCommand("/regenerate", "answer the last question again", _regenerate),
    "save": SlashCommand("/save FILE", "write the conversation to a JSON file", _save),
    "load": SlashCommand("/load FILE", "go on with a saved conversation", _load),
    "clear": SlashCommand("/clear", "forget the conversation", _clear),
    "exit": SlashCommand("/exit", "leave", _exit),
}
_ALIASES = {"bye": "exit", "quit": "exit", "?": "help", "retry": "regenerate"}


def obey(conversation: Conversation, line: str) -> Reply:
    """Carry out a line that begins with a slash; what is wrong with it is in the reply's text."""
    from caudal.core import InvalidRequestError

    word, _, argument = line[1:].partition(" ")
    command = COMMANDS.get(_ALIASES.get(word, word))
    if command is None:
        return Reply(f"There is no command /{word}; /help shows them all.")
    try:
        return command.run(conversation, argument.strip())
    except (click.UsageError, InvalidRequestError, OSError, ValueError) as error:
        return Reply(error.message if isinstance(error, click.ClickException) else describe(error))
