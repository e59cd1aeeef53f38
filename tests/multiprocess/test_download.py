"""Ranks that start on a machine without data: one of them downloads, the others wait and use the same file."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from poseidon.tasks.download import download
from support.ranks import run_ranks
from support.server import FileServer

pytestmark = pytest.mark.multiprocess
CONTENT = bytes(range(256)) * 4096
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def download_on_rank(rank: int, world_size: int, url: str, folder: Path) -> bytes:
    (folder / f"rank{rank}").touch()
    return download(url, sha256=SHA256, into=folder / "cache").read_bytes()


def test_four_ranks_with_an_empty_cache_ask_once(tmp_path: Path) -> None:
    def wait_for_all() -> None:
        deadline = time.monotonic() + 20
        while len(list(tmp_path.glob("rank*"))) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)

    with FileServer({"/shoes.bin": CONTENT}, before_answer=wait_for_all) as server:
        contents = run_ranks(4, download_on_rank, server.url("/shoes.bin"), tmp_path, init=False)
    assert contents == [CONTENT] * 4
    assert server.requests == ["/shoes.bin"]


def die_with_half(rank: int, world_size: int, url: str, folder: Path) -> bytes:
    if rank == 0:
        os.fsync = lambda descriptor: os._exit(9)  # type: ignore[assignment]
    else:
        deadline = time.monotonic() + 20
        while not (folder / "cache" / ".shoes.bin.part").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    return download(url, sha256=SHA256, into=folder / "cache").read_bytes()


def test_another_rank_takes_over_from_one_that_dies_with_half_a_file(tmp_path: Path) -> None:
    with FileServer({"/shoes.bin": CONTENT}) as server:
        contents = run_ranks(2, die_with_half, server.url("/shoes.bin"), tmp_path, init=False, expect_dead=[0])
    assert contents == [None, CONTENT]
    assert len(server.requests) == 2
