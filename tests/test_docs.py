"""What the documents say is true: commands exist, snippets run, the file map matches the tree."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from caudal.cli import group

ROOT = Path(__file__).resolve().parent.parent
READMES = [ROOT / "README.md", ROOT / "README.es.md"]
# What `git status` would show and the file map need not explain.
UNMAPPED = {".clang-format", ".gitignore", "CMakeLists.txt", "pyproject.toml"}


def blocks(path, language):
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def caudal_commands():
    """Every `caudal ...` of the documents, as argument lists."""
    found = set()
    for path in [*READMES, ROOT / "bench" / "README.md", *(ROOT / "docs").glob("*.md")]:
        for block in blocks(path, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                for part in line.split("#")[0].split("|"):
                    words = shlex.split(part.strip().rstrip("&"))
                    if words[:1] == ["caudal"]:
                        found.add(tuple(words[1:]))
    return sorted(found)


def test_readmes_are_short():
    for path in READMES:
        assert len(path.read_text("utf-8").splitlines()) <= 200


def test_readmes_have_the_same_commands_and_code():
    for language in ("sh", "python"):
        english, spanish = ([re.sub(r"\s+#.*", "", b) for b in blocks(path, language)] for path in READMES)
        assert english == spanish


@pytest.mark.parametrize("arguments", caudal_commands(), ids=" ".join)
def test_commands_are_understood(arguments):
    """Each command in the documents parses; what it does is tested elsewhere."""
    parent = group.make_context("caudal", list(arguments))
    command = group.get_command(parent, arguments[0])
    assert command is not None
    assert command.make_context(arguments[0], list(arguments[1:]), parent=parent).params
    assert CliRunner().invoke(group, [arguments[0], "--help"]).exit_code == 0


def test_python_snippets_run(smollm2, tmp_path):
    """In a process of its own, with the real model in place of its name."""
    for block in blocks(ROOT / "README.md", "python"):
        code = block.replace('"smollm2:135m"', repr(str(smollm2)))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert "Paris" in done.stdout


def test_links_lead_somewhere():
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "bench").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text("utf-8")):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name} links to {target}"


def tracked():
    """The files of the repository, as Git knows them."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a Git checkout")
    return [Path(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.name)
def test_file_map_matches_the_tree(readme):
    rows = re.findall(r"^\| (`[^|]*`) \|", readme.read_text("utf-8"), re.MULTILINE)
    mapped = set()
    for row in rows:
        folder = ""
        for name in re.findall(r"`([^`]+)`", row):
            # `src/caudal/core.py`, `config.py`: the second is beside the first.
            path = name if (ROOT / name).exists() else f"{folder}/{name}"
            assert (ROOT / path).exists(), f"the file map has {name}, the tree has not"
            folder = str(Path(path).parent)
            mapped.add(path.rstrip("/"))
    for file in tracked():
        covered = any(str(file) == path or str(file).startswith(f"{path}/") for path in mapped)
        trivial = file.name in ("__init__.py", "__main__.py", "py.typed") or file.suffix == ".pyi"
        assert covered or trivial or str(file) in UNMAPPED or (len(file.parts) == 1 and file.suffix in (".md", "")), (
            file
        )


def test_command_reference_is_current():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from generate_cli import cli_reference
    finally:
        sys.path.pop(0)
    assert (ROOT / "docs" / "cli.md").read_text("utf-8") == cli_reference(), "run `make docs`"


def test_architecture_names_every_package():
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    for package in (ROOT / "src" / "caudal").iterdir():
        if package.is_dir() and (package / "__init__.py").exists():
            assert f"`{package.name}/`" in text, package.name


def test_traps_name_tests_that_exist():
    """docs/numerical-traps.md: 38 traps, each with a test or a check that is there."""
    text = (ROOT / "docs" / "numerical-traps.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 39))
    for number, tests in rows:
        named = re.findall(r"`([\w/.]+)(?:::(\w+))?`|\"([^\"]+)\"", tests)
        assert named or tests.startswith("the same"), number
        source = ""
        for path, function, case in named:
            if path:
                source = (ROOT / path).read_text("utf-8")
            if function:
                assert re.search(rf"def {function}\(", source), (number, function)
            if case:
                assert f'TEST_CASE("{case}"' in source.replace('"\n          "', ""), (number, case)
