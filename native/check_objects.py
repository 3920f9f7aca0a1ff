"""Fails where the object files of the kernels are not what the sources mean.

    python native/check_objects.py BUILD_DIR

BUILD_DIR holds a Release build by GCC. Two things are looked up. First, that the files for one instruction set define
nothing that the linker could take in place of the same function of other files, which would then run on CPUs that
lack the instructions. Second, that the sums of matrix products are kept in registers: every fused product is
disassembled, and the vector registers that it stores on the stack are counted. A function may store as many as it
needs by design (sums of 3 and 4 tokens with AVX2, where 16 registers are not enough; scales of a block that are
expanded there), and no more: one more means that GCC moves values in and out within the inner loop, which costs up to
half of the speed.
"""

from __future__ import annotations

import functools
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FUNCTION = re.compile(r"^[0-9a-f]+ <(?P<name>.*)>:$")
_INSTRUCTION_SET = re.compile(r"_(avx2|avx512)\.cpp\.o$")
_STORE = re.compile(r"\tv?mov\w+\s+%[yz]mm\d+,[^,]*\(%r[sb]p[^)]*\)$")


@dataclass(frozen=True, slots=True)
class Budget:
    """Stores on the stack that functions may have whose name, without namespaces and arguments, matches `pattern`."""

    library: str  # CMake target
    pattern: str
    stores: int
    functions: int  # how many there are at least: a renamed function must not escape


BUDGETS = [
    Budget("caudal_avx2", r"multiply<Panel\w+, 1, \w+>", 0, 14),
    Budget("caudal_avx2", r"multiply<Panel\w+, 2, \w+>", 3, 14),
    Budget("caudal_avx2", r"multiply<Panel\w+, 3, \w+>", 15, 14),
    Budget("caudal_avx2", r"multiply<Panel\w+, 4, \w+>", 25, 14),
    Budget("caudal_avx2", r"multiply_block<Panel\w+, 1, .*>", 6, 24),
    Budget("caudal_avx2", r"multiply_block<Panel\w+, 2, .*>", 13, 24),
    Budget("caudal_avx2", r"multiply_block<Panel\w+, 3, .*>", 22, 24),
    Budget("caudal_avx2", r"multiply_block<Panel\w+, 4, .*>", 32, 24),
    Budget("caudal_avx2", r"multiply_few<Panel(?!Q2_K)\w+, [12]>", 63, 10),
    Budget("caudal_avx2", r"multiply_few<PanelQ2_K, [12]>", 117, 2),
    Budget("caudal_avx2", r"accumulate<\d>", 0, 3),
    Budget("caudal_avx512", r"multiply<Panel\w+, .*>", 0, 70),
    Budget("caudal_avx512", r"multiply_block<Panel(Q[45]_K|IQ4_XS), .*>", 0, 30),
    Budget("caudal_avx512", r"multiply_block<PanelQ[236]_K, .*>", 12, 30),
    Budget("caudal_avx512", r"multiply_few<Panel(?!Q2_K)\w+, .*>", 33, 25),
    Budget("caudal_avx512", r"multiply_few<PanelQ2_K, .*>", 73, 5),
]


@functools.cache
def stack_stores(library: Path) -> dict[str, int]:
    """Vector stores on the stack of each function in the object files of a CMake target."""
    counts: dict[str, int] = {}
    for file in sorted(library.rglob("*gemm*.o")):
        listing = subprocess.run(
            ["objdump", "-dC", "--no-show-raw-insn", file], check=True, capture_output=True, text=True
        )
        for name, lines in functions(listing.stdout.splitlines()):
            counts[name] = sum(1 for line in lines if _STORE.search(line.rstrip()))
    return counts


def shared_symbols(build: Path) -> list[str]:
    """Functions and data of the files for one instruction set that the linker may merge with those of others."""
    found: list[str] = []
    for file in sorted(build.glob("CMakeFiles/caudal_*.dir/native/kernels/*.o")):
        if not _INSTRUCTION_SET.search(file.name):
            continue
        listing = subprocess.run(["nm", "-C", "--defined-only", file], check=True, capture_output=True, text=True)
        for line in listing.stdout.splitlines():
            _, kind, name = line.split(maxsplit=2)
            if kind in "WVu":
                found.append(f"{file.name}: {name} may take the place of the same function in other files")
    return found


def functions(listing: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The functions of a disassembly, by their names without namespaces and arguments."""
    name, lines = "", list[str]()
    for line in [*listing, "0 <end>:"]:
        match = _FUNCTION.match(line)
        if match is None:
            lines.append(line)
            continue
        if name:
            yield name, lines
        plain = re.sub(r"caudal::|\(anonymous namespace\)::|\[clone .*\]", "", match["name"])
        name, lines = plain.removeprefix("void ").split("(")[0], []


def main() -> int:
    build = Path(sys.argv[1])
    if platform.machine() not in ("x86_64", "AMD64"):
        print("object files: not checked, as only the kernels for x86-64 have budgets")
        return 0
    if shutil.which("objdump") is None:
        print("object files: not checked, as objdump and nm (binutils) are not installed")
        return 0
    compiler = next(build.glob("CMakeFiles/*/CMakeCXXCompiler.cmake")).read_text()
    if 'CMAKE_CXX_COMPILER_ID "GNU"' not in compiler:
        print("object files: not checked, as the compiler is not GCC")
        return 0
    problems = shared_symbols(build)
    checked = 0
    for budget in BUDGETS:
        library = build / "CMakeFiles" / f"{budget.library}.dir"
        found = {n: c for n, c in stack_stores(library).items() if re.fullmatch(budget.pattern, n)}
        if len(found) < budget.functions:
            problems.append(
                f"{budget.library}: {len(found)} functions match {budget.pattern!r}, not {budget.functions}"
            )
        for name, count in found.items():
            checked += 1
            if count > budget.stores:
                problems.append(f"{budget.library}: {name} stores {count} vectors on the stack, not {budget.stores}")
    print("\n".join(problems) if problems else f"object files: no shared symbols, and no spills in {checked} products")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
