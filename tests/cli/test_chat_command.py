"""The chat: answers, interrupts and the context's end with a fake model; a whole one in a real terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from caudal.cli import chat
from caudal.cli.support.conversation import Conversation
from caudal.core import CaudalError, FinishReason, InvalidRequestError, RequestOutput, SamplingParams, Timings


class FakeSession:
    """Counts words as tokens, and answers with what it is told."""

    name = "fake"
    max_model_len = 40

    def __init__(self, *answers):
        self.answers = list(answers)
        self.prompts = []
        self.closed = 0

    def check(self, params):
        pass

    def chat_prompt(self, messages):
        return [0 for message in messages for _ in message["content"].split()]

    def stream(self, prompt_ids, params):
        self.prompts.append(len(prompt_ids))
        try:
            for item in self.answers.pop(0):
                if isinstance(item, KeyboardInterrupt):
                    raise item
                if isinstance(item, CaudalError):
                    yield RequestOutput("r", 0, "", (), finish_reason=FinishReason.ERROR, error=item)
                    return
                yield RequestOutput("r", 0, item, (1,), num_output_tokens=1)
            yield RequestOutput(
                "r", 0, "", (), finish_reason=FinishReason.STOP, num_output_tokens=3, timings=Timings(0.0, 0.5, 1.5)
            )
        finally:
            self.closed += 1


def answer(session, *questions):
    conversation = Conversation(SamplingParams(), session.check)
    for question in questions:
        conversation.ask(question)
        chat.answer(session, conversation)
    return conversation


def test_an_answer_streams_and_is_remembered(capsys):
    session = FakeSession(["One ", "two"])
    talk = answer(session, "Count.")
    captured = capsys.readouterr()
    assert captured.out == "One two\n"
    assert "2.0 tokens/s" in captured.err
    assert "0.50 s" in captured.err
    assert talk.turns[-1] == {"role": "assistant", "content": "One two"}


def test_an_interrupt_stops_the_answer_only(capsys):
    session = FakeSession(["One ", KeyboardInterrupt()], ["Yes"])
    talk = answer(session, "Count.", "More?")
    assert [m["content"] for m in talk.turns] == ["Count.", "One ", "More?", "Yes"]
    assert session.closed == 2
    assert "[stopped]" in capsys.readouterr().out


def test_a_failed_request_leaves_no_trace():
    session = FakeSession([InvalidRequestError("too hot")])
    talk = Conversation(SamplingParams(), session.check)
    talk.ask("Count.")
    with pytest.raises(InvalidRequestError, match="too hot"):
        chat.answer(session, talk)
    assert talk.turns == []


def test_the_oldest_turns_make_room(capsys):
    session = FakeSession(["a " * 10], ["b " * 10], ["c"])
    talk = answer(session, "x " * 10, "y " * 10, "z " * 5)
    assert session.prompts == [10, 30, 25]
    assert [m["content"][0] for m in talk.turns] == ["y", "b", "z", "c"]
    assert "left out" in capsys.readouterr().err


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, *command, **environment):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # what runs in the background of a shell ignores Ctrl-C
            os.execvpe(command[0], command, os.environ | environment)
        self.text = ""

    def type(self, text):
        os.write(self.fd, text.encode())

    def wait_for(self, words, seconds=60.0):
        """Read until `words` appear in what has not been waited for yet."""
        end = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < end, f"{words!r} did not come; the terminal has:\n{self.text}"
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:
                    pytest.fail(f"the program ended before {words!r} came:\n{self.text}")
        seen, self.text = self.text.split(words, 1)
        return seen

    def exit_code(self, seconds=30.0):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        pytest.fail("the program did not end")


PROMPT = "\x1b[?2004h"  # the line editor has taken the terminal: pasted text is bracketed from now on
ENTERED = "\x1b[?2004l"  # it has let go


def test_a_whole_chat_in_a_terminal(smollm2, tmp_path):
    saved = tmp_path / "talk.json"
    terminal = Terminal(
        *(sys.executable, "-m", "caudal", "chat", str(smollm2), "--threads", "1", "--temperature", "0"),
        XDG_STATE_HOME=str(tmp_path),
        TERM="xterm",
        PROMPT_TOOLKIT_NO_CPR="1",  # nothing here answers "where is the cursor?"
    )
    terminal.wait_for("/help")

    def enter(line):
        terminal.wait_for(PROMPT)
        terminal.type(f"{line}\r")
        terminal.wait_for(ENTERED)

    enter("/set max_tokens 1500")
    terminal.wait_for("max_tokens = 1500")
    enter("Write a very long story about a river.")
    terminal.wait_for(" the ")
    terminal.type("\x03")
    terminal.wait_for("[stopped]")
    enter("/set max_tokens 5")
    terminal.wait_for("max_tokens = 5")
    enter("Say hello.")
    terminal.wait_for("tokens/s")
    enter(f"/save {saved}")
    terminal.wait_for("Saved")
    terminal.wait_for(PROMPT)
    terminal.type("\x04")
    assert terminal.exit_code() == 0
    assert "Say hello." in saved.read_text()
    assert "long story" in (tmp_path / "caudal" / "chat_history").read_text()


@pytest.mark.parametrize(("stdin", "words"), [("", chat.SAMPLE_PROMPT), ("Write the numbers from 1 to 5.", "1, 2, 3")])
def test_without_a_terminal_one_prompt_is_answered(smollm2, stdin, words):
    done = subprocess.run(
        [sys.executable, "-m", "caudal", "chat", str(smollm2), "--max-tokens", "20", "--temperature", "0"],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert words in done.stdout


def test_a_silent_pipe_does_not_hang(smollm2):
    silent, keep_open = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "caudal", "chat", str(smollm2), "--max-tokens", "4"],
            stdin=silent,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(keep_open)
        os.close(silent)
    assert done.returncode == 0
    assert chat.SAMPLE_PROMPT in done.stdout
