"""The model families: checkpoint -> ModelConfig and Program.

A family is one file in this folder with functions marked by `@architecture`; nothing else is edited.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from caudal.core import InvalidModelFileError, UnsupportedModelError
from caudal.formats import Checkpoint
from caudal.graph.ops import validate
from caudal.graph.program import Builder, Program, Value
from caudal.models.config import ModelConfig

Build = Callable[[Builder, ModelConfig], Value]

# Rotary frequencies that old converters stored for each layer; they follow from the metadata.
_IGNORABLE = re.compile(r"blk\.\d+\.attn_rot_embd(\.weight)?")


@dataclass(frozen=True, slots=True)
class Architecture:
    """A function that records the models of one family, and the names of these in files."""

    names: tuple[str, ...]
    norm_rope: frozenset[str]
    build: Build


def architecture(*names: str, norm_rope: Iterable[str] = ()) -> Callable[[Build], Architecture]:
    """Mark a function as the recorder of these architectures (`general.architecture` of GGUF files).

    `norm_rope`: those of them whose GGUF files have the rows of q and k in the order that rotates adjacent
    pairs; the others rotate the two halves of a head.
    """
    return lambda build: Architecture(names, frozenset(norm_rope), build)


@cache
def _registry() -> dict[str, Architecture]:
    """All architectures by name, gathered from every file in this folder."""
    found: dict[str, Architecture] = {}
    for info in pkgutil.iter_modules(__path__):
        for member in vars(importlib.import_module(f"{__name__}.{info.name}")).values():
            if isinstance(member, Architecture):
                for name in member.names:
                    if found.setdefault(name, member) is not member:
                        raise ValueError(f"two model files have the architecture {name!r}")
    return found


def supported_architectures() -> list[str]:
    """Their names, sorted."""
    return sorted(_registry())


def build_program(checkpoint: Checkpoint) -> tuple[ModelConfig, Program]:
    """Record the model of a checkpoint; every weight and attribute is checked (`graph.ops.validate`).

    Raises UnsupportedModelError for an architecture or a part of it that Caudal does not have, naming it, and
    InvalidModelFileError if metadata and tensors do not fit together.
    """
    name = checkpoint.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise InvalidModelFileError(f"{checkpoint.path}: the metadata do not name an architecture")
    known = _registry().get(name)
    if known is None:
        near = difflib.get_close_matches(name, _registry(), n=1)
        hint = f"the nearest supported one is {near[0]!r}; " if near else ""
        raise UnsupportedModelError(
            f"the architecture {name!r} is not supported; {hint}supported are {', '.join(supported_architectures())}"
        )
    config = ModelConfig.from_gguf(
        checkpoint.metadata, checkpoint.tensors, rope_style="norm" if name in known.norm_rope else "neox"
    )
    builder = Builder(checkpoint.tensors)
    builder.program.output = known.build(builder, config).id
    program = builder.program
    validate(program, {name: tensor.shape for name, tensor in checkpoint.tensors.items()})
    unused = [n for n in checkpoint.tensors if n not in program.weight_names and not _IGNORABLE.fullmatch(n)]
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise UnsupportedModelError(
            f"the file has tensors that {name!r} models of Caudal do not use: {unused[0]}{more}; "
            "ignoring them would give wrong results"
        )
    return config, program
