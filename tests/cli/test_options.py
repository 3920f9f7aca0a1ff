"""Flags follow the settings, and read what people write."""

from __future__ import annotations

import dataclasses

import click
import pytest
from click.testing import CliRunner

from caudal.cli.support.options import (
    CONVERSATION_DEFAULTS,
    SAMPLING_HELP,
    IntList,
    engine_options,
    parse_sampling,
    sampling_options,
    server_options,
    take,
)
from caudal.config import EngineConfig, ServerConfig
from caudal.core import SamplingParams


def words(line):
    return line.split()


def parse(decorator, settings, *arguments):
    """The settings that a command with these flags would get."""
    seen = []

    @click.command()
    @decorator
    def command(**values):
        seen.append(take(settings, values))
        assert values == {}

    result = CliRunner().invoke(command, arguments)
    if result.exit_code:
        raise ValueError(result.output)
    return seen[0]


def test_without_flags_the_settings_have_their_defaults():
    assert parse(engine_options(), EngineConfig) == EngineConfig()
    assert parse(server_options, ServerConfig) == ServerConfig()
    assert parse(sampling_options, SamplingParams) == SamplingParams(**CONVERSATION_DEFAULTS)


def test_the_flags_of_serve_that_others_rely_on():
    config = parse(
        engine_options(),
        EngineConfig,
        *words("--threads 2 --ctx 4096 --kv-cache-memory 64MiB --kv-type q8 --max-num-seqs 8"),
        *words("--max-num-batched-tokens 256 --no-prefix-caching"),
    )
    assert config == EngineConfig(
        num_threads=2,
        max_model_len=4096,
        kv_cache_memory=64 * 1024**2,
        kv_type="q8",
        max_num_seqs=8,
        max_num_batched_tokens=256,
        prefix_caching=False,
    )
    server = parse(
        server_options, ServerConfig, *words("--host ::1 --port 9 --api-key k --allowed-origins a --allowed-origins b")
    )
    assert server == ServerConfig(host="::1", port=9, api_key="k", allowed_origins=("a", "b"))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--kv-cache-memory", "lots"), "not a size"),
        (("--kv-cache-memory", "9" * 400), "beyond all bounds"),
        (("--kv-type", "q2"), "'f16', 'q8'"),
        (("--threads", "two"), "not a valid integer"),
    ],
)
def test_wrong_values_are_named(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse(engine_options(), EngineConfig, *arguments)


def test_sampling_flags():
    params = parse(
        sampling_options,
        SamplingParams,
        *words("--temperature 0.5 --top-k 40 --stop a --stop b --seed 7 --ignore-eos"),
    )
    assert params == SamplingParams(temperature=0.5, min_p=0.05, top_k=40, stop=("a", "b"), seed=7, ignore_eos=True)


def test_every_sampling_help_belongs_to_a_field():
    assert set(SAMPLING_HELP) <= {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.25", 0.25),
        ("top-k", "40", 40),
        ("seed", "none", None),
        ("temperature", "default", CONVERSATION_DEFAULTS["temperature"]),
        ("stop", "default", ()),
        ("max_tokens", "12", 12),
        ("stop", "\n", ("\n",)),
        ("ignore_eos", "true", True),
    ],
)
def test_one_sampling_value_from_text(name, text, value):
    assert parse_sampling(name, text) == value


@pytest.mark.parametrize(("name", "text"), [("temperature", "hot"), ("heat", "1"), ("n", "2")])
def test_wrong_sampling_value_from_text(name, text):
    with pytest.raises(click.UsageError):
        parse_sampling(name, text)


def test_integer_lists():
    assert IntList(1).convert("1,4,16", None, None) == (1, 4, 16)
    for text in ("1,0", "a", "", "1,,2"):
        with pytest.raises(click.UsageError):
            IntList(1).convert(text, None, None)
