"""Downloads: kept when whole and right, replaced when damaged, and one clear line for whatever goes wrong."""

import errno
import fcntl
import gzip
import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from poseidon.errors import ConfigError
from poseidon.tasks import download as module
from poseidon.tasks import fashion_mnist as fashion
from poseidon.tasks import load_task
from poseidon.tasks.download import cache_folder, download
from support.server import FileServer

CONTENT = b"many pictures of shoes" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("POSEIDON_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer({"/shoes.bin": CONTENT, "/shoes.bin.gz": gzip.compress(CONTENT)}) as running:
        yield running


def test_a_file_is_fetched_once_and_kept(server: FileServer) -> None:
    path = download(server.url("/shoes.bin"), sha256=SHA256)
    assert path.read_bytes() == CONTENT
    assert download(server.url("/shoes.bin"), sha256=SHA256) == path
    assert server.requests == ["/shoes.bin"]
    assert sorted(file.name for file in path.parent.iterdir()) == [".shoes.bin.lock", "shoes.bin"]


def test_a_damaged_file_is_replaced(server: FileServer, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "shoes.bin").write_bytes(CONTENT[:-1])
    path = download(server.url("/shoes.bin"), sha256=SHA256, into=tmp_path)
    assert path.read_bytes() == CONTENT
    assert "shoes.bin is damaged and is downloaded again" in caplog.text


def test_the_checksum_can_be_that_of_what_is_inside(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "shoes.bin.gz").write_bytes(gzip.compress(CONTENT)[:-20])
    path = download(server.url("/shoes.bin.gz"), sha256=SHA256, into=tmp_path, unpacked=True)
    assert gzip.decompress(path.read_bytes()) == CONTENT
    with pytest.raises(ConfigError, match="expected"):
        download(server.url("/shoes.bin.gz"), sha256=SHA256, into=tmp_path / "other")


def test_a_file_of_this_machine_has_an_address_too(tmp_path: Path) -> None:
    (tmp_path / "shoes and more.bin").write_bytes(CONTENT)
    path = download((tmp_path / "shoes and more.bin").as_uri(), sha256=SHA256)
    assert path.name == "shoes and more.bin"
    assert path.read_bytes() == CONTENT


def test_another_content_is_refused_and_not_kept(server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"the SHA-256 {SHA256}, expected 0000"):
        download(server.url("/shoes.bin"), sha256="0" * 64, into=tmp_path)
    assert [file.name for file in tmp_path.iterdir() if file.suffix != ".lock"] == ["cache"] * (
        tmp_path / "cache"
    ).exists()


def test_an_answer_that_breaks_off_is_refused(tmp_path: Path) -> None:
    with (
        FileServer({"/shoes.bin": CONTENT}, missing_bytes=100) as server,
        pytest.raises(ConfigError, match=r"connection broke off|the SHA-256"),
    ):
        download(server.url("/shoes.bin"), sha256=SHA256, into=tmp_path)
    assert not (tmp_path / "shoes.bin").exists()


def test_a_server_that_has_no_such_file_is_named(server: FileServer) -> None:
    with pytest.raises(ConfigError, match=r"cannot download http://.*/boots.bin: the server answers 404"):
        download(server.url("/boots.bin"), sha256=SHA256)


def test_a_host_that_is_not_reached_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match=rf"cannot download http://127.0.0.1:{port}/shoes.bin: .*refused") as caught:
        download(f"http://127.0.0.1:{port}/shoes.bin", sha256=SHA256)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["ftp://host/file", "https://host/", "shoes.bin"])
def test_what_is_no_address_of_a_file_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="give the address of a file"):
        download(url, sha256=SHA256)


@pytest.mark.parametrize(("number", "message"), [(errno.ENOSPC, "free some space"), (errno.EROFS, "make it writable")])
def test_what_the_file_system_refuses_is_said(
    server: FileServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, message: str
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module.os, "fsync", refuse)
    with pytest.raises(ConfigError, match=rf"cannot keep .* in {tmp_path}: {os.strerror(number)}; {message}"):
        download(server.url("/shoes.bin"), sha256=SHA256, into=tmp_path)
    assert not (tmp_path / ".shoes.bin.part").exists()


def test_who_is_waited_for_is_named(server: FileServer, tmp_path: Path) -> None:
    lock = tmp_path / ".shoes.bin.lock"
    lock.write_text("process 12 on atlas")
    with open(lock) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="waited 0 s for process 12 on atlas, which downloads it"):
            download(server.url("/shoes.bin"), sha256=SHA256, into=tmp_path, patience=0.2)
    assert server.requests == []


def test_where_files_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache" / "poseidon"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path.home() / ".cache" / "poseidon"
    monkeypatch.setenv("POSEIDON_DATA", str(tmp_path))
    assert cache_folder() == tmp_path / "downloads"


# Fashion-MNIST from an address


@pytest.fixture
def whole_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FileServer]:
    """With the embedded files in the place of the training set, since the whole set is not at hand."""
    embedded = {name: name.replace("train", "t10k") for name in fashion._CHECKSUMS}
    monkeypatch.setattr(fashion, "_DEBIAN_FOLDER", tmp_path / "debian")
    monkeypatch.setattr(fashion, "_CHECKSUMS", {name: fashion._CHECKSUMS[source] for name, source in embedded.items()})
    files = {
        f"/fashion/{name}.gz": (fashion._EMBEDDED_FOLDER / f"{source}.gz").read_bytes()
        for name, source in embedded.items()
    }
    with FileServer(files) as running:
        yield running


@pytest.mark.parametrize("given", ["argument", "environment"])
def test_fashion_mnist_can_be_fetched(whole_set: FileServer, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    options: dict[str, Any] = {"data": whole_set.url("/fashion/")} if given == "argument" else {}
    if given == "environment":
        monkeypatch.setenv("POSEIDON_DATA", whole_set.url("/fashion"))
    task = load_task("fashion-mnist", **options)
    assert f"from {whole_set.url('/fashion')}" in task.note
    assert whole_set.requests == []
    assert (len(task.make_train_data()), len(task.make_test_data())) == (10_000, 10_000)
    assert len(task.make_train_data()) == 10_000
    assert len(whole_set.requests) == 4


def test_what_is_on_this_machine_comes_before_an_address(whole_set: FileServer, tmp_path: Path) -> None:
    (tmp_path / "debian").mkdir()
    for name in fashion._CHECKSUMS:
        (tmp_path / "debian" / name).write_bytes(b"")
    task = load_task("fashion-mnist", data=whole_set.url("/fashion"))
    assert f"from {tmp_path / 'debian'}" in task.note
