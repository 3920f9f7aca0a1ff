"""The comparison with llama.cpp's tools, run with small scripts in their place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "vs_llamacpp.py"

LLAMA_BENCH = """#!{python}
import json, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
if "-d" in flags:
    print(json.dumps([{{"n_depth": int(d), "avg_ts": 1e-3}} for d in flags["-d"].split(",")]))
else:
    print(json.dumps([{{"n_prompt": int(p), "avg_ts": 1e-3}} for p in flags["-p"].split(",")]))
"""
BATCHED_BENCH = """#!{python}
import json, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
print("a line of another kind")
for batch in flags["-npl"].split(","):
    print(json.dumps({{"pl": int(batch), "speed_tg": 1e-3}}))
"""
BOUNDS = """#!{python}
import json, sys
print(json.dumps({{"read_gb_s": 1e6, "gmac_s": {{kind: 1e6 for kind in sys.argv[4:]}}}}))
"""
BROKEN = """#!{python}
import sys
sys.exit(3)
"""


def write_tool(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text.format(python=sys.executable))
    path.chmod(0o755)
    return path


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    write_tool(tmp_path / "peer" / "llama-bench", LLAMA_BENCH)
    write_tool(tmp_path / "peer" / "llama-batched-bench", BATCHED_BENCH)
    return tmp_path / "peer"


def compare(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments), "--rounds", "1", "--json"],
        check=False,
        capture_output=True,
        text=True,
    )


def test_every_group_gives_its_rows(smollm2: Path, peer: Path, tmp_path: Path) -> None:
    bounds = write_tool(tmp_path / "bounds", BOUNDS)
    done = compare(smollm2, "--peer", f"tool={peer}", "--only", "load", "batch", "--bounds", bounds)
    assert done.returncode == 0, done.stderr
    rows = {row["test"]: row for row in json.loads(done.stdout)["results"]}
    assert list(rows) == ["load, cold", "load, warm", *(f"decode, {n} at once" for n in (1, 2, 4, 8, 16, 32))]
    row = rows["decode, 4 at once"]
    assert row["caudal"] > 1
    assert row["tool"] == 1e-3
    low, high = row["against tool"].split(" (")[0], row["caudal"] / 1e-3
    assert float(low) == pytest.approx(high, abs=0.01)
    assert row["bound"] in ("bandwidth", "arithmetic")
    assert row["caudal's share"].endswith("%")
    assert rows["load, warm"]["caudal's share"] == "-"


def test_a_tool_that_fails_is_named_and_the_rest_goes_on(smollm2: Path, peer: Path, tmp_path: Path) -> None:
    write_tool(tmp_path / "broken" / "llama-bench", BROKEN)
    done = compare(
        smollm2, "--peer", f"good={peer}", "--peer", f"bad={tmp_path / 'broken'}", "--only", "load", "--threads", "1"
    )
    assert done.returncode == 1
    assert "bad failed: exit code 3" in done.stderr
    for row in json.loads(done.stdout)["results"]:
        assert row["bad"] == "failed"
        assert row["against bad"] == "-"
        assert row["good"] > 0
        assert row["caudal"] > 0
