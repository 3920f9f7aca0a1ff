"""Whole commands in a process of their own: output, errors, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import click
import numpy as np
import pytest

from caudal.cli import group
from conftest import shared_dir


def caudal(*arguments, stdin="", **options):
    return subprocess.run(
        [sys.executable, "-m", "caudal", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def words(line):
    return line.split()


@pytest.fixture(scope="module")
def tiny():
    return shared_dir("golden", "arch", "gguf", "llama.gguf")


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["show", "/nowhere/model.gguf"], 3, ["/nowhere/model.gguf"]),
        (["show", "smollm2:1350m"], 3, ["smollm2:135m"]),
        (["show", "pypi:no/such"], 3, ["pypi:NAME"]),
        (["rm", "smollm2:135m"], 3, ["not in the store"]),
        (["nonsense"], 2, ["nonsense"]),
        (["cht"], 2, ["cht", "Did you mean 'chat'?"]),
        (["logits", "m", "--tokens", "1,x", "--out", "o"], 2, ["1,x"]),
        (["bench", "m", "--prompt", "0", "--gen", "0"], 2, ["nothing to measure"]),
        (["serve", "a", "b"], 2, ["one model"]),
    ],
)
def test_errors_name_what_is_wrong(arguments, code, words, tmp_path, monkeypatch):
    monkeypatch.setenv("CAUDAL_HOME", str(tmp_path))
    done = caudal(*arguments)
    assert done.returncode == code
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_a_file_that_is_no_model(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_text("hello")
    done = caudal("show", file)
    assert (done.returncode, "not a GGUF" in done.stderr) == (4, True)


def test_a_truncated_model(tmp_path, tiny):
    file = tmp_path / "model.gguf"
    file.write_bytes(tiny.read_bytes()[:-1000])
    done = caudal("logits", file, "--tokens", "1", "--out", tmp_path / "o")
    assert done.returncode == 4
    assert str(file) in done.stderr
    assert not (tmp_path / "o").exists()


def test_an_architecture_that_is_not_supported(tmp_path):
    done = caudal("logits", shared_dir("golden", "arch", "gguf", "bert.gguf"), "--tokens", "1", "--out", tmp_path / "o")
    assert (done.returncode, "bert" in done.stderr) == (5, True)


def test_pytorch_is_not_part_of_this_build(tmp_path, tiny):
    done = caudal("logits", tiny, "--tokens", "1", "--executor", "pytorch", "--out", tmp_path / "o")
    assert (done.returncode, "not part of this build" in done.stderr) == (5, True)


def test_more_memory_than_there_is(tiny, tmp_path):
    done = caudal("run", tiny, "x", "--kv-cache-memory", "100TiB")
    assert done.returncode == 6
    assert "100" in done.stderr


def test_a_reader_that_closes_early_is_no_error(tiny):
    done = subprocess.run(
        f"{sys.executable} -m caudal show {tiny} --tensors | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""


# ------------------------------------------------------------------------------------------------- help


def test_every_command_has_help_with_examples():
    commands = group.list_commands(click.Context(group))
    assert {*words("chat run serve pull list show rm bench tokenize logits perplexity version")} <= set(commands)
    for command in [*commands, "ls"]:
        done = caudal(command, "--help")
        assert done.returncode == 0
        assert "Examples:" in done.stdout, command


def test_version():
    assert json.loads(caudal("version", "--json").stdout)["caudal"] in caudal("--version").stdout


# ---------------------------------------------------------------------------------------------- commands


def nmse(ours, reference):
    return float(((ours - reference) ** 2).sum() / (reference**2).sum())


@pytest.mark.parametrize("executor", ["native", "reference"])
def test_logits_are_the_reference_ones(executor, tiny, tmp_path):
    reference = np.load(tiny.with_suffix(".npz"))
    tokens = ",".join(map(str, reference["tokens_9"]))
    out = tmp_path / "logits.npy"
    assert caudal("logits", tiny, "--tokens", tokens, "--all", "--executor", executor, "--out", out).returncode == 0
    everything = np.load(out)
    assert (everything.shape, everything.dtype) == (reference["logits_9"].shape, np.float32)
    assert nmse(everything, reference["logits_9"]) < 1e-6
    assert caudal("logits", tiny, "--tokens", tokens, "--executor", executor, "--out", out).returncode == 0
    # Bit-identical is what the native executor promises; numpy's matrix product depends on the number of rows.
    np.testing.assert_allclose(np.load(out), everything[-1], rtol=0, atol=0 if executor == "native" else 1e-5)


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ("logits MODEL --tokens 1 --out o --max-num-batched-tokens 0", "max_num_batched_tokens"),
        ("logits MODEL --tokens 1 --out o --threads -1 --executor reference", "num_threads"),
        ("perplexity MODEL MODEL -c 8 --max-num-batched-tokens 0", "max_num_batched_tokens"),
        ("bench MODEL --threads -1", "num_threads"),
        ("show MODEL --ctx -5", "max_model_len"),
        ("serve MODEL --port 0 --drain-timeout nan", "drain_timeout"),
    ],
)
def test_settings_out_of_range_are_wrong_usage(tiny, tmp_path, arguments, setting):
    done = caudal(*[tiny if word == "MODEL" else word for word in words(arguments)], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"caudal: {setting} must be ")


def test_tokens_outside_the_vocabulary_are_refused(tiny, tmp_path):
    done = caudal("logits", tiny, "--tokens", "1,99999", "--out", tmp_path / "o")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_show(tiny):
    shown = json.loads(caudal("show", tiny, "--json", "--tensors", "--graph", "--ctx", "64").stdout)
    assert shown["architecture"] == "llama"
    assert shown["parameters"] == sum(np.prod(t["shape"]) for t in shown["tensors"])
    assert shown["memory"]["total_bytes"] == shown["memory"]["weights_bytes"] + shown["memory"]["kv_cache_bytes"]
    assert shown["memory"]["context"] == 64
    assert shown["memory"]["file_bytes"] == tiny.stat().st_size
    assert sum(t["bytes"] for t in shown["tensors"]) == sum(use["bytes"] for use in shown["quantization"])
    half = json.loads(caudal("show", tiny, "--json", "--ctx", "64", "--kv-type", "q8").stdout)
    assert half["memory"]["kv_cache_bytes"] < shown["memory"]["kv_cache_bytes"]
    assert any("attention" in line for line in shown["graph"])
    assert "attention" in caudal("show", tiny, "--graph").stdout
    assert "general.architecture" in caudal("show", tiny).stdout


def test_what_cannot_run_can_be_looked_at():
    shown = caudal("show", shared_dir("golden", "arch", "gguf", "bert.gguf"))
    assert shown.returncode == 0
    assert "cannot run" in shown.stdout


def test_bench_prints_what_others_read(tiny):
    done = caudal("bench", tiny, "--json", *words("--threads 1 --prompt 16,32 --gen 4 --batch 1,3 --depth 8 --runs 2"))
    results = json.loads(done.stdout)
    assert [(r["test"], r["n_prompt"], r["n_gen"], r["batch"], r["depth"]) for r in results] == [
        ("prefill", 16, 0, 1, 8),
        ("prefill", 32, 0, 1, 8),
        ("decode", 0, 4, 1, 8),
        ("decode", 0, 4, 3, 8),
    ]
    assert all(r["tokens_per_second"] == np.median(r["samples"]) > 0 and r["runs"] == 2 for r in results)
    assert "decode" in caudal("bench", tiny, *words("--threads 1 --prompt 0 --gen 2 --batch 1 --runs 1")).stdout


def test_tokenize():
    vocabulary = shared_dir("data", "vocab", "ggml-vocab-qwen2.gguf")
    texts = Path(f"{vocabulary}.inp").read_text("utf-8").split("\n__ggml_vocab_test__\n")
    wanted = Path(f"{vocabulary}.out").read_text().splitlines()
    text, ids = next((t, w) for t, w in zip(texts, wanted, strict=False) if len(t) > 10)
    assert json.loads(caudal("tokenize", vocabulary, "--json", "--no-special", stdin=text).stdout) == [
        int(i) for i in ids.split()
    ]
    lines = caudal("tokenize", vocabulary, text).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ids.split()


def test_perplexity_within_the_error_bar(smollm2):
    """The first two chunks of the reference text; llama-perplexity's running value after them is 17.7551."""
    text = shared_dir("golden", "perplexity_text.txt")
    reference = json.loads(shared_dir("golden", "perplexity_full.json").read_text())["results"]["as_is_Q4_1"]
    done = caudal("perplexity", smollm2, text, "-c", "512", "--chunks", "2", "--json")
    result = json.loads(done.stdout)
    assert result["chunks"] == 2
    assert result["tokens"] == 2 * 255
    assert result["perplexity"] == pytest.approx(reference["running"][1], rel=0.015)


def test_a_text_too_short_for_perplexity(smollm2, tmp_path):
    (tmp_path / "short.txt").write_text("Too short.")
    done = caudal("perplexity", smollm2, tmp_path / "short.txt")
    assert (done.returncode, "512 are needed" in done.stderr) == (2, True)


def test_run(tiny):
    """One answer: from an argument or a pipe, as text or JSON, and the same each time."""
    flags = words("--raw --threads 1 --temperature 0 --max-tokens 8 --ignore-eos")
    result = json.loads(caudal("run", tiny, "Hello there", *flags, "--json").stdout)
    assert result["model"] == "llama"
    assert (result["completion_tokens"], len(result["token_ids"])) == (8, 8)
    assert result["finish_reason"] == "length"
    assert 0 < result["first_token_seconds"] <= result["total_seconds"]
    again = caudal("run", tiny, *flags, stdin="Hello there\n")
    assert again.stdout == result["text"] + "\n"
    around = json.loads(caudal("run", tiny, "Hello", "-", *flags, "--json", stdin="there\n").stdout)
    assert around["token_ids"] == result["token_ids"]


def test_run_samples_by_seed(tiny):
    flags = words("--raw --threads 1 --temperature 1 --max-tokens 16 --ignore-eos --json --seed")
    first, again, other = (json.loads(caudal("run", tiny, "Hi", *flags, seed).stdout) for seed in (7, 7, 8))
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["--temperature", "9"], 2, "temperature must be"),
        (["--temperature", "-1"], 2, "temperature must be"),
        (["--ctx", "999999"], 5, "999999"),
        (["--top-k", "x"], 2, "not a valid integer"),
    ],
)
def test_run_says_what_is_wrong(tiny, arguments, code, complaint):
    done = caudal("run", tiny, "Hi", *arguments)
    assert (done.returncode, done.stdout, complaint in done.stderr) == (code, "", True)


def test_run_needs_a_prompt(tiny):
    assert caudal("run", tiny).returncode == 2


def test_a_closed_input_is_an_empty_one(tiny):
    closed = ["sh", "-c", 'exec "$0" -m caudal "$@" <&-', sys.executable]
    done = subprocess.run([*closed, "run", tiny], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "the prompt is empty" in done.stderr) == (2, True)
    chat = [*closed, "chat", tiny, "--max-tokens", "2"]
    done = subprocess.run(chat, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("> ")


@pytest.mark.parametrize("command", ["run", "chat", "tokenize"])
def test_input_that_is_no_text_is_read_as_far_as_it_is(tiny, command):
    limit = [] if command == "tokenize" else ["--max-tokens", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "caudal", command, tiny, *limit],
        input=b"a\xffb",
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert command != "tokenize" or done.stdout.count(b"\n") >= 3


def test_list_shows_what_can_be_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("CAUDAL_HOME", str(tmp_path))
    assert [(m["name"], m["fetched"]) for m in json.loads(caudal("ls", "--json").stdout)] == [("smollm2:135m", False)]
    assert "not fetched" in caudal("list").stdout


def test_serve_until_told_to_stop(tiny):
    """Healthy once it says so; a second server on the port is refused; SIGTERM ends it with 0."""
    server = subprocess.Popen(
        [sys.executable, "-m", "caudal", "serve", str(tiny), *words("--port 0 --threads 1 --served-model-name tiny")],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    try:
        url = next(line.split()[-1] for line in server.stderr if "Listening" in line)
        with urllib.request.urlopen(f"{url}/health") as answer:
            assert answer.status == 200
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            assert json.load(answer)["data"][0]["id"] == "tiny"
        second = caudal("serve", tiny, "--port", url.rsplit(":", 1)[1])
        assert (second.returncode, "in use" in second.stderr) == (7, True)
    finally:
        server.terminate()
        rest = server.stderr.read()
        server.stderr.close()
    assert (server.wait(timeout=30), rest) == (0, "")
