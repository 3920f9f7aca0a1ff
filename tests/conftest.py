"""Where tests find reference data and a real model, and how they say that these are not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# The references' small matrix products gain nothing from numpy's own threads, which spin for a core beside others.
# It counts because no plugin imports numpy before this file.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def shared_dir(*parts: str) -> Path:
    """A folder or file of the reference data that lies beside the repository; skips the test without it."""
    path = Path(os.environ.get("CAUDAL_SHARED", ROOT.parent / "shared")).joinpath(*parts)
    if not path.exists():
        pytest.skip(
            f"needs the reference data {path.name} of ../shared (set CAUDAL_SHARED to its place)",
            allow_module_level=True,
        )
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct Q4_1; `make test` fetches it into the store."""
    from caudal.store import Store

    for folder in (ROOT / "models", Store.default().root):
        for path in sorted(folder.rglob(MODEL_FILE)) if folder.is_dir() else []:
            return path
    pytest.skip("needs the default model: run `make model`")
