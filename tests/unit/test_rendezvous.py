"""With which secret a rank looks for the coordinator that rank 0 serves."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from poseidon.comm.remote_store import RemoteStore
from poseidon.comm.secret import Secret
from poseidon.errors import ConfigError
from poseidon.runtime import rendezvous
from poseidon.runtime.rendezvous import Place


def place(*, is_one_host: bool) -> Place:
    return Place(rank=1, world_size=2, address="127.0.0.1", port=1, is_one_host=is_one_host, prefix="job/")


@pytest.mark.parametrize("is_one_host", [True, False])
def test_a_secret_in_torchs_store_counts_across_hosts_only(is_one_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reaches that store may write there; the file on one host is this user's alone."""
    store, written = dist.HashStore(), Secret.make()
    dist.PrefixStore("poseidon/job/", store).set("coordinator", json.dumps(["127.0.0.1", 1, written.hex]))
    monkeypatch.setattr(rendezvous, "_torch_client", lambda place: store)
    taken: list[str | None] = []
    monkeypatch.setattr(rendezvous, "_find", lambda place, secret, address, port: taken.append(secret and secret.hex))
    rendezvous._through_torch(place(is_one_host=is_one_host), None)
    assert taken == [None if is_one_host else written.hex]


def test_a_file_that_comes_right_after_it_was_looked_for_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, secret, read = tmp_path / "secret", Secret.make(), Secret.read

    def read_too_early(path: Path) -> Secret:
        try:
            return read(path)
        except ConfigError:
            rendezvous._write_private(path, secret.hex)
            raise

    monkeypatch.setattr(rendezvous, "_UNREAD_SECONDS", 0.0)
    monkeypatch.setattr(rendezvous, "_secret_path", lambda place: path)
    monkeypatch.setattr(Secret, "read", read_too_early)
    monkeypatch.setattr(RemoteStore, "connect", lambda store: None)
    found = rendezvous._find(place(is_one_host=True), None, "127.0.0.1", 1)
    assert found.coordinator.secret.hex == secret.hex


def test_each_meeting_of_a_process_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Place.find(0, 2, 1).prefix != Place.find(0, 2, 1).prefix
