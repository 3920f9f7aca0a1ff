"""Which part may import which, what stays light, and where torch may appear."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

from conftest import ROOT

SRC = ROOT / "src"
MODULES = {
    ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((SRC / "caudal").rglob("*.py"))
}
NATIVE = "_native"

# What each part may import of ours, beside itself. The longest matching name on the left decides, so a module
# with a rule of its own sees no more of its package than that rule says.
RULES: dict[str, tuple[str, ...]] = {
    "core": (),
    "config": (),
    "quants": ("core", "config"),
    "formats": ("core", "config", "quants"),
    "text": ("core", "config"),
    "graph": ("core", "config"),
    "store": ("core", "config"),
    "models": ("core", "config", "formats", "graph"),
    "executors": ("core", "config", "formats", "graph", "models", "quants", NATIVE),
    "engine": ("core", "config", "executors.base", "text"),
    "engine.sampling": ("core", "config", "executors.base"),
    "engine.native_sampling": ("core", "config", "engine.sampling", "executors.base", NATIVE),
    "engine.scheduler": ("core", "config", "engine.blocks"),
    "engine.blocks": ("core", "config"),
    "api": ("core", "config", "engine.manager", "engine.worker", "store", "text"),
    "web": (),
    "train": ("core", "config", "executors.pytorch", "formats", "graph", "models"),
    "llm": ("core", "config", "engine", "loader", "store", "text"),
    "loader": ("core", "config", "engine", "executors", "formats", "text"),
    "cli": ("",),  # all
    "__main__": ("cli",),
    "": ("core", "config", "llm"),  # caudal/__init__.py
}

STDLIB_ONLY = ("core", "config", "engine.scheduler", "engine.blocks")
TORCH_HOMES = ("executors.pytorch", "executors.kernels", "train")


def within(name: str, part: str) -> bool:
    return part == "" or name == part or name.startswith(f"{part}.")


def rule_for(name: str) -> str:
    return max((part for part in RULES if within(name, part)), key=len)


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Full names of all imported modules, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parts, base]).rstrip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in MODULES or full == f"caudal.{NATIVE}" else base


def wrong_imports(name: str, source: str, *, is_package: bool = False) -> list[str]:
    """Of the module `name` (without `caudal.` in front): what it imports of ours and may not."""
    full = f"caudal.{name}".rstrip(".")
    package = full if is_package else full.rpartition(".")[0]
    part = rule_for(name)
    wrong: list[str] = []
    for target in imported(ast.parse(source), package):
        if not within(target, "caudal") or target == "caudal":  # the root has nothing but the version and public names
            continue
        inner = target.removeprefix("caudal.")
        allowed = any(within(inner, other) for other in RULES[part]) or (part != "" and within(inner, part))
        if not allowed:
            wrong.append(inner)
    return wrong


def third_party(name: str, source: str) -> set[str]:
    """Top-level names that a module imports when it runs (not under TYPE_CHECKING) and that are not ours."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    tops = {target.partition(".")[0] for target in imported(tree, f"caudal.{name}".rpartition(".")[0])}
    return tops - {"caudal", ""} - sys.stdlib_module_names


each_module = pytest.mark.parametrize("module", MODULES)


@each_module
def test_import_direction(module: str):
    path = MODULES[module]
    name = module.removeprefix("caudal").removeprefix(".")
    wrong = wrong_imports(name, path.read_text(), is_package=path.name == "__init__.py")
    assert not wrong, f"{module} must not import {wrong}"


@each_module
def test_torch_stays_in_its_homes(module: str):
    name = module.removeprefix("caudal").removeprefix(".")
    if any(within(name, home) for home in TORCH_HOMES):
        return
    found = third_party(name, MODULES[module].read_text()) & {"torch", "triton", "transformers"}
    assert not found, f"{module} imports {found}"


@pytest.mark.parametrize("name", STDLIB_ONLY)
def test_the_core_needs_no_library(name: str):
    found = third_party(name, MODULES[f"caudal.{name}"].read_text())
    assert not found, f"caudal.{name} imports {found}"


def test_every_part_has_a_rule():
    parts = {module.split(".")[1] for module in MODULES if "." in module}
    assert parts <= RULES.keys()


@pytest.mark.parametrize(
    ("name", "source", "wrong"),
    [
        ("engine.engine", "from caudal.executors.native import NativeExecutor", ["executors.native"]),
        ("engine.engine", "from caudal.executors.base import Executor", []),
        ("engine.engine", "from caudal.executors import native", ["executors.native"]),
        ("engine.scheduler", "from caudal.engine.engine import Engine", ["engine.engine"]),
        ("engine.engine", "from caudal import _native", ["_native"]),
        ("engine.native_sampling", "from caudal import _native", []),
        ("api.openai", "import caudal.models", ["models"]),
        ("api.openai", "from caudal import __version__", []),
        ("api.openai", "def f():\n    from caudal.graph import ops", ["graph.ops"]),
        ("graph.ops", "from caudal.formats import Checkpoint", ["formats"]),
        ("graph.ops", "from . import program\nfrom .program import Op\nfrom ..core import Batch", []),
        ("graph.ops", "from ..models import build_program", ["models"]),
        ("models.llama", "from caudal.executors.base import KVLayout", ["executors.base"]),
        ("core", "from caudal.config import EngineConfig", ["config"]),
        ("cli.show", "from caudal.graph.describe import describe", []),
        ("", "from caudal.engine.worker import AsyncEngine", ["engine.worker"]),
    ],
)
def test_the_rules_find_wrong_imports(name: str, source: str, wrong: list[str]):
    assert wrong_imports(name, source) == wrong


def test_the_rules_find_libraries():
    source = "from typing import TYPE_CHECKING\nimport os, torch.nn\nif TYPE_CHECKING:\n    import numpy\n"
    assert third_party("engine.scheduler", source) == {"torch"}


def loaded_after(statements: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter has loaded, or tried to find, after `statements`."""
    script = f"""
import sys
seen = []
class Spy:
    def find_spec(self, name, path=None, target=None):
        seen.append(name)
sys.meta_path.insert(0, Spy())
{statements}
print(",".join({{name.partition(".")[0] for name in (*sys.modules, *seen)}}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.strip().split(","))


HEAVY = {"numpy", "tokenizers", "jinja2", "fastapi", "uvicorn", "pydantic", "rich", "huggingface_hub", "torch"}


def test_importing_caudal_is_light():
    assert not loaded_after("import caudal; caudal.SamplingParams(); caudal.EngineConfig()") & HEAVY


def test_nothing_but_the_torch_homes_needs_torch():
    """Every module of the CPU engine, its server and commands, imported together."""
    names = [
        module
        for module in MODULES
        if module != "caudal.__main__"
        and not any(within(module.removeprefix("caudal").removeprefix("."), home) for home in TORCH_HOMES)
    ]
    loaded = loaded_after("\n".join(f"import {name}" for name in names))
    assert not loaded & {"torch", "transformers", "scipy", "triton"}
    assert "numpy" in loaded
