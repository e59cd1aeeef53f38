"""Downloads that the ranks of a machine share: one of them writes, the others wait and use what it wrote."""

import errno
import fcntl
import gzip
import hashlib
import http.client
import logging
import os
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.response import addinfourl

from poseidon.errors import ConfigError
from poseidon.units import GIB, MIB, format_bytes

log = logging.getLogger(__name__)

SILENCE_SECONDS = 30.0
"""How long a server may say nothing."""
PATIENCE_SECONDS = 1800.0
"""How long to wait for another process that downloads the same file."""
MOST_BYTES = 64 * GIB
"""Of a file, and of what is inside it: neither a server that never ends nor a gzipped bomb fills disk or time."""
_POLL_SECONDS = 0.1
_LONGEST_HOLDER = 400
"""Of what a lock file says about who holds it."""
_SAY_SECONDS = 5.0
"""Between two lines on how far a download is."""


def download(
    url: str, *, sha256: str, into: Path | None = None, unpacked: bool = False, patience: float = PATIENCE_SECONDS
) -> Path:
    """The file behind an address, downloaded once for all processes of this machine and kept.

    What is there already is used if its checksum is right, and replaced if not. A file appears under its name only when
    it is whole and right, however a download may end.

    Args:
        url: `https://…`, `http://…` or `file://…`; the file is kept under the last part of its path.
        sha256: Expected SHA-256 of the file, in hexadecimal.
        into: The folder to keep it in; one of its own below `cache_folder()` if left out.
        unpacked: Whether the checksum is that of what is inside the file, which is gzipped.
        patience: Seconds to wait for another process that downloads it.

    Raises:
        ConfigError: It cannot be fetched or written, has another checksum, or another process takes too long.
    """
    address = urllib.parse.urlsplit(url)
    name = Path(urllib.parse.unquote(address.path)).name
    if address.scheme not in ("http", "https", "file") or not name:
        raise ConfigError(f"cannot download {url!r}: give the address of a file, beginning with https, http or file")
    path = (into or cache_folder() / sha256[:16]) / name
    with _os_errors_named(url, path):
        if _digest_of(path, unpacked) == sha256:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path, url, patience):
            if _digest_of(path, unpacked) == sha256:
                return path
            if path.exists():
                log.warning("%s is damaged and is downloaded again", path)
            _fetch(url, path, sha256, unpacked)
    return path


def cache_folder() -> Path:
    """Where downloads are kept: in the folder `POSEIDON_DATA` if it names one, or among the user's cached files."""
    data = os.environ.get("POSEIDON_DATA", "")
    if data and Path(data).is_dir():
        return Path(data) / "downloads"
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache") / "poseidon"


def _fetch(url: str, path: Path, sha256: str, unpacked: bool) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb", opener=_no_link) as file:
            _copy(url, file)
            file.flush()
            os.fsync(file.fileno())
        found = _digest_of(part, unpacked)
        if found != sha256:
            raise ConfigError(
                f"cannot use what {url} gives: its content has the SHA-256 {found or 'of nothing'}, expected {sha256}; "
                "it is damaged or another file, so try again or give another address"
            )
        os.replace(part, path)
        _sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _copy(url: str, file: BinaryIO) -> None:
    """Writes what the address gives, and says now and then how far it is."""
    began = said = time.monotonic()
    num_bytes = 0
    with _reading(url) as response:
        length = response.headers.get("Content-Length")
        total = f" of {format_bytes(int(length))}" if length and length.isdecimal() else ""
        log.info("downloading %s%s", url, total.replace(" of", ",", 1))
        while chunk := response.read(MIB):
            num_bytes += len(chunk)
            if num_bytes > MOST_BYTES:
                raise ConfigError(
                    f"cannot download {url}: it goes on after {format_bytes(MOST_BYTES)}, the most that is kept"
                )
            file.write(chunk)
            if time.monotonic() - said > _SAY_SECONDS:
                said = time.monotonic()
                log.info("downloading %s: %s%s", url, format_bytes(num_bytes), total)
    log.info("downloaded %s: %s in %.1f s", url, format_bytes(num_bytes), time.monotonic() - began)


@contextmanager
def _reading(url: str) -> Iterator[addinfourl]:
    """The open address; what the network does to it in between becomes our error."""
    hint = "check the address and the network, or copy the file there by hand"
    try:
        with urllib.request.urlopen(url, timeout=SILENCE_SECONDS) as response:
            yield response
    except urllib.error.HTTPError as error:
        raise ConfigError(f"cannot download {url}: the server answers {error.code} {error.reason}; {hint}") from error
    except urllib.error.URLError as error:
        raise ConfigError(f"cannot download {url}: {error.reason}; {hint}") from error
    except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
        raise ConfigError(f"cannot download {url}: the connection broke off: {error!r}; {hint}") from error


@contextmanager
def _alone(path: Path, url: str, patience: float) -> Iterator[None]:
    """Holds the lock of a file among the processes of this machine; it goes with the process that holds it."""
    with open(path.with_name(f".{path.name}.lock"), "a+", encoding="utf-8", opener=_no_link) as lock:
        _acquire(lock.fileno(), lock.name, url, patience)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield


def _acquire(descriptor: int, name: str, url: str, patience: float) -> None:
    deadline = time.monotonic() + patience
    waited = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _first_line(Path(name)) or "another process"
            if not waited:
                log.info("waiting for %s, which downloads %s", holder, url)
            waited = True
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"cannot use {url}: waited {patience:.0f} s for {holder}, which downloads it; look what it does, "
                    "end it if it hangs, and try again"
                ) from error
            time.sleep(_POLL_SECONDS)
        else:
            return


def _no_link(path: str, flags: int) -> int:
    """Opens a file of ours, and no other that somebody has put a link to in its place."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _first_line(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline(_LONGEST_HOLDER)


def _digest_of(path: Path, unpacked: bool) -> str:
    """SHA-256 of a file, or of what is inside; empty where there is none, or where it cannot be unpacked."""
    if not path.is_file():
        return ""
    digest = hashlib.sha256()
    try:
        with gzip.open(path) if unpacked else open(path, "rb") as file:
            num_bytes = 0
            while chunk := file.read(MIB):
                digest.update(chunk)
                num_bytes += len(chunk)
                if num_bytes > MOST_BYTES:
                    return ""
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return ""
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _os_errors_named(url: str, path: Path) -> Iterator[None]:
    """What the file system refuses becomes our error, in one line."""
    try:
        yield
    except OSError as error:
        hint = "free some space" if error.errno == errno.ENOSPC else "make it writable"
        raise ConfigError(
            f"cannot keep {url} in {path.parent}: {error.strerror or error}; {hint}, or let POSEIDON_DATA name another "
            "folder"
        ) from error
