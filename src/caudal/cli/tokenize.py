"""`caudal tokenize`: text to token ids."""

from __future__ import annotations

import click

from caudal.cli.support.input import read_stdin
from caudal.cli.support.options import json_option, model_argument
from caudal.cli.support.output import print_json


@click.command(short_help="Turn text into token ids.")
@model_argument
@click.argument("text", required=False)
@click.option("--no-special", is_flag=True, help="Add no begin or end token, and read <|...|> as plain text.")
@json_option
def command(model: str, text: str | None, no_special: bool, as_json: bool) -> None:
    """Print the token ids of TEXT, or of standard input.

    With --json a list of ids; otherwise one token in a line: id and text.

    \b
    Examples:
      caudal tokenize smollm2:135m "Hello world"
      caudal tokenize smollm2:135m --json < book.txt
    """
    from caudal.cli.support.models import open_model, open_tokenizer

    tokenizer = open_tokenizer(open_model(model))
    content = read_stdin() if text is None else text
    ids = tokenizer.encode(content, add_special=not no_special, parse_special=not no_special)
    if as_json:
        print_json(ids, indent=None)
        return
    for token_id in ids:
        print(f"{token_id:>8}  {tokenizer.token_bytes(token_id).decode('utf-8', errors='replace')!r}")
