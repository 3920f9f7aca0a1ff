"""Importing this package costs next to nothing: the libraries come with the first tokenizer and the first chat."""

from __future__ import annotations

import subprocess
import sys

CHECK = """
import sys
import caudal.text.tokenizer, caudal.text.detokenizer, caudal.text.chat
print(sorted({"tokenizers", "jinja2", "numpy", "json5", "transformers"} & sys.modules.keys()))
"""


def test_no_library_is_imported() -> None:
    result = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
