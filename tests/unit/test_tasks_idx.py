"""IDX files: what is read, what is refused."""

import gzip
import hashlib
from pathlib import Path

import pytest

from poseidon.errors import ConfigError
from poseidon.tasks.idx import read_idx

TWO_BY_THREE = bytes((0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6))


def write(folder: Path, content: bytes) -> Path:
    path = folder / "x-idx2-ubyte"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("content", [TWO_BY_THREE, gzip.compress(TWO_BY_THREE)])
def test_plain_and_gzipped_files_are_read(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, content)
    checksum = hashlib.sha256(TWO_BY_THREE).hexdigest()
    assert read_idx(path, sha256=checksum).tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts with nothing"),
        (b"\x00\x00\x08", "starts with 000008"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x00", "starts with 00000d01"),
        (b"\x00\x00\x08\x00", "starts with 00000800"),
        (TWO_BY_THREE[:10], "starts with 00000802"),
        (TWO_BY_THREE[:-1], r"says \(2, 3\), so 18 bytes, and it has 17"),
        (TWO_BY_THREE + b"7", r"says \(2, 3\), so 18 bytes, and it has 19"),
        (gzip.compress(TWO_BY_THREE)[:-9], "cannot read"),
        (b"\x1f\x8bnot gzip", "cannot read"),
    ],
)
def test_a_file_that_is_not_whole_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


def test_a_changed_byte_is_refused_with_both_checksums(tmp_path: Path) -> None:
    path = write(tmp_path, TWO_BY_THREE[:-1] + b"\x07")
    expected = hashlib.sha256(TWO_BY_THREE).hexdigest()
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ConfigError, match=f"{found}, expected {expected}; .* install or copy it again"):
        read_idx(path, sha256=expected)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nothing: No such file"):
        read_idx(tmp_path / "nothing")


def test_nothing_of_size_zero_can_be_read(tmp_path: Path) -> None:
    assert read_idx(write(tmp_path, bytes((0, 0, 8, 1, 0, 0, 0, 0)))).shape == (0,)
