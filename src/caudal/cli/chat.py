"""`caudal chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from caudal.cli.support.errors import report_error
from caudal.cli.support.input import read_stdin
from caudal.cli.support.options import engine_options, sampling_options, take
from caudal.cli.support.output import remark
from caudal.config import EngineConfig
from caudal.core import CaudalError, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from caudal.cli.support.conversation import Conversation
    from caudal.core import Timings
    from caudal.llm import LLM

MIN_ANSWER = 256  # tokens of context kept free for an answer
SAMPLE_PROMPT = "Say hello and tell me in one sentence what you can do."
PIPE_WAIT = 2.0  # seconds after which a pipe that says nothing counts as empty


@click.command(short_help="Talk with a model in the terminal.")
@click.argument("model", required=False)
@click.option("--system", default="", help="System prompt.")
@sampling_options
@engine_options()
def command(model: str | None, system: str, **settings: Any) -> None:
    """Talk with a model; without MODEL with the default one, which is fetched on first use.

    /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the chat. When standard input is no terminal,
    one prompt is read from it and answered (a sample prompt if there is none).

    \b
    Examples:
      caudal chat
      caudal chat smollm2:135m --temperature 0.7 --system "You are a pirate."
      echo "Name three rivers." | caudal chat
    """
    from caudal.cli.support.conversation import Conversation
    from caudal.cli.support.models import display_name, open_llm
    from caudal.engine.sampling import validate
    from caudal.store import default_model

    name = model or default_model()
    params = take(SamplingParams, settings)
    with open_llm(name, take(EngineConfig, settings)) as llm:

        def check(params: SamplingParams) -> None:
            validate(params, llm.tokenizer.vocab_size, llm.max_model_len)

        conversation = Conversation(params, check, model=display_name(name), system=system)
        if sys.stdin.isatty():
            _talk(llm, conversation)
        else:
            conversation.ask(_piped_prompt() or SAMPLE_PROMPT)
            if conversation.turns[0]["content"] == SAMPLE_PROMPT:
                print(f"> {SAMPLE_PROMPT}")
            answer(llm, conversation)


def _piped_prompt() -> str:
    """What standard input says, unless it stays silent."""
    import select

    readable, _, _ = select.select([sys.stdin], [], [], PIPE_WAIT)
    return read_stdin().strip() if readable else ""


def _talk(llm: LLM, conversation: Conversation) -> None:
    from caudal.cli.support.conversation import obey

    read_line = _line_reader()
    remark(f"{conversation.model}: /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the chat.")
    while True:
        try:
            line = read_line().strip()
        except KeyboardInterrupt:
            continue  # drops the line that was being typed
        except EOFError:
            return
        if line.startswith("/"):
            reply = obey(conversation, line)
            if reply.text:
                print(reply.text)
            if reply.leave:
                return
            if not reply.regenerate:
                continue
        elif line:
            conversation.ask(line)
        else:
            continue
        try:
            answer(llm, conversation)
        except CaudalError as error:
            report_error(error)


def answer(llm: LLM, conversation: Conversation) -> None:
    """Stream an answer to the last turn. Ctrl-C stops it; what was said until then stays.

    Raises the CaudalError that ended the request; its question is forgotten then.
    """
    text = ""
    output = None
    try:
        with closing(llm.stream(_fitting_prompt(llm, conversation), conversation.params)) as stream:
            for output in stream:
                text += output.text
                print(output.text, end="", flush=True)
                if output.error is not None:
                    raise output.error
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    finally:
        print()
        if text:
            conversation.answer(text)
        else:
            conversation.drop_question()
    if output is not None and output.timings is not None:
        remark(_speed(output.num_output_tokens, output.timings))


def _fitting_prompt(llm: LLM, conversation: Conversation) -> list[int]:
    """Token ids of the conversation, without its oldest turns if those leave no room for an answer."""
    room = min(MIN_ANSWER, llm.max_model_len // 4)
    prompt = llm.chat_prompt(conversation.messages)
    dropped = 0
    while len(prompt) + room > llm.max_model_len and conversation.drop_oldest():
        dropped += 1
        prompt = llm.chat_prompt(conversation.messages)
    if dropped:
        remark(f"(left out the oldest {dropped} of the turns: the context holds {llm.max_model_len} tokens)")
    return prompt


def _speed(num_tokens: int, timings: Timings) -> str:
    decode_seconds = timings.total - timings.first_token
    rate = f"{(num_tokens - 1) / decode_seconds:.1f} tokens/s, " if num_tokens > 1 and decode_seconds > 0 else ""
    return f"({num_tokens} tokens, {rate}first one after {timings.first_token:.2f} s)"


def _line_reader() -> Callable[[], str]:
    """Reads a line with editing, completion of commands, and a history that outlives the chat."""
    from platformdirs import user_state_path
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    from caudal.cli.support.conversation import COMMANDS

    history = user_state_path("caudal", ensure_exists=True) / "chat_history"
    history.touch(mode=0o600)  # what people type is theirs alone
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    reader: PromptSession[str] = PromptSession(
        history=FileHistory(str(history)),
        completer=WordCompleter([f"/{name}" for name in COMMANDS], sentence=True),
        complete_while_typing=False,
        key_bindings=keys,
    )
    return lambda: reader.prompt("> ")
