"""`caudal run`: one answer, for scripts and pipes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from caudal.cli.support.input import read_stdin
from caudal.cli.support.options import engine_options, json_option, model_argument, sampling_options, take
from caudal.cli.support.output import print_json
from caudal.config import EngineConfig
from caudal.core import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence


@click.command(short_help="Answer one prompt.")
@model_argument
@click.argument("prompt", nargs=-1)
@click.option("--system", default="", help="System prompt.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the model's chat template.")
@sampling_options
@engine_options()
@json_option
def command(model: str, prompt: tuple[str, ...], system: str, raw: bool, as_json: bool, **settings: Any) -> None:
    """Answer PROMPT, as it comes; without PROMPT the text on standard input.

    A PROMPT that is - stands for standard input, so that text can be put around it.

    \b
    Examples:
      caudal run smollm2:135m "Why is the sky blue?"
      caudal run smollm2:135m --temperature 0 --max-tokens 50 --json "Name three rivers."
      caudal run smollm2:135m "Summarize this:" - < report.txt
      caudal run smollm2:135m --raw "Once upon a time"
    """
    from caudal.cli.support.models import display_name, open_llm

    text = _read_prompt(prompt)
    params = take(SamplingParams, settings)
    with open_llm(model, take(EngineConfig, settings)) as llm:
        if raw:
            prompt_ids = llm.tokenizer.encode(text)
        else:
            head = [{"role": "system", "content": system}] if system else []
            prompt_ids = llm.chat_prompt([*head, {"role": "user", "content": text}])
        outputs: list[RequestOutput] = []
        for output in llm.stream(prompt_ids, params):
            if output.error is not None:
                raise output.error
            outputs.append(output)
            if not as_json:
                print(output.text, end="", flush=True)
        if as_json:
            print_json(_result(display_name(model), prompt_ids, outputs))
        else:
            print()


def _read_prompt(words: tuple[str, ...]) -> str:
    if not words:
        if sys.stdin.isatty():
            raise click.UsageError("no prompt: give one as an argument or on standard input; `caudal chat MODEL` talks")
        words = ("-",)
    text = " ".join(read_stdin().rstrip("\n") if word == "-" else word for word in words)
    if not text:
        raise click.UsageError("the prompt is empty")
    return text


def _result(model: str, prompt_ids: Sequence[int], outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    last = outputs[-1]
    result: dict[str, Any] = {
        "model": model,
        "text": "".join(output.text for output in outputs),
        "token_ids": [token_id for output in outputs for token_id in output.token_ids],
        "finish_reason": last.finish_reason.value if last.finish_reason else None,
        "stop_reason": last.stop_reason,
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": last.num_output_tokens,
    }
    if last.timings is not None:
        result["first_token_seconds"] = last.timings.first_token
        result["total_seconds"] = last.timings.total
    return result
