"""`caudal show`: what is in a model file, and what it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Any

import click

from caudal.cli.support.options import engine_options, json_option, model_argument, take
from caudal.cli.support.output import print_json, print_table
from caudal.config import EngineConfig, format_size

if TYPE_CHECKING:
    from caudal.formats import Checkpoint
    from caudal.graph.program import Program

LONG_VALUE = 60  # characters of a metadata value that are shown


@click.command(short_help="Show what is in a model and how much memory it needs.")
@model_argument
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--graph", is_flag=True, help="Print the recorded program, one op in a line.")
@engine_options("max_model_len", "kv_type")
@json_option
def command(model: str, tensors: bool, graph: bool, as_json: bool, **settings: Any) -> None:
    """Show a model's metadata, its mix of quantizations, and the memory it needs at a context length.

    \b
    Examples:
      caudal show smollm2:135m
      caudal show model.gguf --ctx 8192 --kv-type q8
      caudal show model.gguf --tensors --json
      caudal show model.gguf --graph
    """
    from caudal.cli.support.models import open_model
    from caudal.core import InvalidModelFileError, UnsupportedModelError
    from caudal.engine.engine import validate_config
    from caudal.formats import quantization_mix
    from caudal.models import build_program

    engine_config = take(EngineConfig, settings)
    validate_config(engine_config)
    checkpoint = open_model(model)
    if graph and not as_json:
        print(_graph(checkpoint, build_program(checkpoint)[1]))
        return
    facts: dict[str, Any] = {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "architecture": checkpoint.metadata.get("general.architecture"),
        "parameters": sum(tensor.num_elements for tensor in checkpoint.tensors.values()),
        "quantization": [
            {
                "type": use.quant_type.name,
                "tensors": use.num_tensors,
                "parameters": use.num_elements,
                "bytes": use.num_bytes,
            }
            for use in quantization_mix(checkpoint)
        ],
        "metadata": {key: _short(value) for key, value in checkpoint.metadata.items()},
    }
    try:
        config, program = build_program(checkpoint)
        facts["context_length"] = config.context_length
        facts["vocab_size"] = config.vocab_size
        facts["memory"] = _memory(
            checkpoint, program, engine_config.max_model_len or config.context_length, engine_config.kv_type
        )
        if graph:
            facts["graph"] = _graph(checkpoint, program).splitlines()
    except (InvalidModelFileError, UnsupportedModelError) as error:
        facts["problem"] = str(error)  # what cannot run can still be looked at
    if tensors:
        facts["tensors"] = _tensors(checkpoint)
    if as_json:
        print_json(facts)
    else:
        _print(facts)


def _short(value: object) -> object:
    """A metadata value as JSON can hold it; long lists and texts are cut."""
    if isinstance(value, str):
        return value if len(value) <= LONG_VALUE else f"{value[:LONG_VALUE]}... ({len(value)} characters)"
    if isinstance(value, int | float | bool):
        return value
    count = len(value) if isinstance(value, Sized) else 0
    return f"list of {count}"


def _tensors(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    return [
        {"name": name, "shape": list(t.shape), "type": t.quant_type.name, "bytes": t.data.nbytes}
        for name, t in checkpoint.tensors.items()
    ]


def _graph(checkpoint: Checkpoint, program: Program) -> str:
    from caudal.graph.describe import describe

    return describe(program, {name: f"{t.quant_type.name} {list(t.shape)}" for name, t in checkpoint.tensors.items()})


def _memory(checkpoint: Checkpoint, program: Program, num_tokens: int, kv_type: str) -> dict[str, Any]:
    """Bytes that the native executor takes for the weights, and for one sequence that fills the context."""
    from caudal.executors.lowering import memory_need
    from caudal.executors.sizing import BLOCK_SIZE

    need = memory_need(program, checkpoint, kv_type)
    kv_cache_bytes = -(-num_tokens // BLOCK_SIZE) * need.kv_block
    return {
        "context": num_tokens,
        "kv_type": kv_type,
        "file_bytes": checkpoint.file_bytes,
        "weights_bytes": need.weights,
        "kv_cache_bytes": kv_cache_bytes,
        "kv_bytes_per_token": need.kv_block // BLOCK_SIZE,
        "total_bytes": need.weights + kv_cache_bytes,
    }


def _print(facts: Mapping[str, Any]) -> None:
    print_table(
        ("model", ""),
        [
            ("file", facts["path"]),
            ("architecture", str(facts["architecture"])),
            ("parameters", f"{facts['parameters'] / 1e6:,.1f} million"),
            *([("context length", f"{facts['context_length']:,} tokens")] if "context_length" in facts else []),
            *([("vocabulary", f"{facts['vocab_size']:,} tokens")] if "vocab_size" in facts else []),
            *([("cannot run", facts["problem"])] if "problem" in facts else []),
        ],
    )
    print_table(
        ("type", "tensors", "parameters", "size"),
        [
            (entry["type"], str(entry["tensors"]), f"{entry['parameters']:,}", format_size(entry["bytes"]))
            for entry in facts["quantization"]
        ],
    )
    if memory := facts.get("memory"):
        print_table(
            ("memory", f"at {memory['context']:,} tokens, KV {memory['kv_type']}"),
            [
                ("weights", format_size(memory["weights_bytes"])),
                ("KV cache", f"{format_size(memory['kv_cache_bytes'])} ({memory['kv_bytes_per_token']:,} B a token)"),
                ("together", format_size(memory["total_bytes"])),
            ],
        )
    print_table(("metadata", "value"), [(key, str(value)) for key, value in facts["metadata"].items()])
    if "tensors" in facts:
        print_table(
            ("tensor", "shape", "type", "size"),
            [
                (t["name"], " x ".join(map(str, t["shape"])), t["type"], format_size(t["bytes"]))
                for t in facts["tensors"]
            ],
        )
