"""Who is lost and who is late: several ranks of one process, over real connections to one coordinator."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import pytest

from poseidon.comm import liveness as liveness_module
from poseidon.comm.liveness import LEAST_SILENCE_SECONDS, LOST_SECONDS, Beat, Liveness, _Peer
from poseidon.comm.remote_store import Coordinator, Patience, RemoteStore, StoreLostError, Trouble
from poseidon.comm.secret import Secret
from poseidon.comm.store_server import StoreServer
from poseidon.errors import PeerLostError
from poseidon.runtime import rendezvous
from poseidon.runtime.rendezvous import Place, wait_for_all

SECRET = Secret.make()
MOST_SECONDS = 30.0
"""Only to end a test that fails: all of these take a second or less."""


class SlowStore(RemoteStore):
    """A store whose beats can be held back."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator)
        self.free = threading.Event()
        self.free.set()

    def beat(self, key: str, value: str, folders: tuple[str, ...]) -> dict[str, bytes]:  # type: ignore[override]
        self.free.wait()
        return super().beat(key, value, folders)


class Ranks(NamedTuple):
    server: StoreServer
    watches: list[Liveness]
    stores: list[SlowStore]

    def die(self, rank: int) -> None:
        """As a process that is killed: its connections end, and nothing else."""
        self.stores[rank].free.clear()
        for line in self.stores[rank]._all:
            line.is_closed = True
            assert line._session is not None
            line._session.socket.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ranks]]:
    monkeypatch.setattr(liveness_module, "BEAT_SECONDS", 0.05)
    with ExitStack() as stack:

        def make(count: int, patience: Patience | None = None, **options: int) -> Ranks:
            server = stack.enter_context(closing(StoreServer(socket.create_server(("127.0.0.1", 0)), SECRET)))
            coordinator = Coordinator(
                address="127.0.0.1", port=server.port, secret=SECRET, patience=patience or Patience()
            )
            stores = [SlowStore(coordinator) for _ in range(count)]
            watches = []
            for rank, store in enumerate(stores):
                watch = Liveness(store, rank, count, host=f"host{rank}", **options)
                stack.callback(watch.close)
                stack.callback(store.free.set)
                watches.append(watch)
            for watch in watches:
                eventually(lambda watch=watch: not watch.missing())  # type: ignore[misc]
            return Ranks(server, watches, stores)

        yield make


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_ends_is_named_by_all_in_the_same_words(ranks: Callable[..., Ranks]) -> None:
    made = ranks(4)
    made.watches[2].follow(lambda: 7)
    eventually(lambda: made.watches[0]._peers[2].beat.num_exchanges == 7)  # type: ignore[union-attr]
    made.die(2)
    left = [made.watches[rank] for rank in (0, 1, 3)]
    eventually(lambda: all(watch.lost() for watch in left))
    (text,) = {watch.lost() for watch in left}
    assert (
        text == "rank 2 is gone: the process ended without a word; last seen on host host2 with 7 exchanges behind it"
    )


def test_silence_loses_a_rank_which_learns_it_when_it_comes_back(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ranks(3)
    monkeypatch.setattr(liveness_module, "LOST_SECONDS", 0.5)
    made.stores[1].free.clear()
    eventually(lambda: made.watches[0].lost() and made.watches[2].lost())
    assert "rank 1 is gone: no sign of life for" in made.watches[0].lost()
    assert made.watches[0].lost() == made.watches[2].lost()
    made.stores[1].free.set()
    eventually(made.watches[1].lost)
    assert made.watches[1].lost().startswith("the other ranks have gone on without this one")


def test_who_has_not_come_to_where_the_others_wait_is_late(ranks: Callable[..., Ranks]) -> None:
    made = ranks(3)
    for rank, count in enumerate((4, 3, 4)):
        made.watches[rank].follow(lambda count=count: count)  # type: ignore[misc]
    with made.watches[2].waiting_in_exchange():
        eventually(lambda: made.watches[0].late(4) == {1: "rank 1 (host1)"})
        eventually(lambda: made.watches[1].late(3) == {})


def test_one_that_ends_by_an_error_says_why_and_one_that_ends_well_is_not_lost(ranks: Callable[..., Ranks]) -> None:
    made = ranks(3)
    watch = made.watches[0]
    made.watches[2].close()
    eventually(lambda: watch._peers[2].farewell == "")
    later = watch._judge(time.monotonic() + 2 * LOST_SECONDS)
    assert later is not None
    assert later.ranks == (1,), "not rank 2"
    assert not watch.lost()
    made.watches[1].close("ValueError: no number")
    eventually(watch.lost)
    assert watch.lost().startswith("rank 1 ended with: ValueError: no number")


def test_silence_counts_from_the_latest_beat_whatever_lies_before(ranks: Callable[..., Ranks]) -> None:
    watch = ranks(2).watches[0]
    now = time.monotonic()
    for hour in range(24):
        now += 3600.0
        watch._peers[1].note(Beat(count=10_000 + hour, num_exchanges=0, host=""), now)
        assert watch._judge(now + LEAST_SILENCE_SECONDS - 0.1) is None
    assert watch._judge(now + LOST_SECONDS + 0.1) is not None


def test_what_broke_is_nobodys_end_once_all_have_beaten_since(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ranks(2)
    monkeypatch.setattr(liveness_module, "SILENT_SECONDS", 0.2)
    assert made.watches[0].name_lost(time.monotonic()) == ""
    made.die(1)
    assert "rank 1 is gone" in made.watches[0].name_lost(time.monotonic())


def test_a_call_that_cannot_end_is_left_when_a_rank_is_lost(ranks: Callable[..., Ranks]) -> None:
    made = ranks(2)
    assert made.watches[0].watch_over(lambda: 5, "a sum") == 5
    with pytest.raises(ZeroDivisionError):
        made.watches[0].watch_over(lambda: 1 // 0, "a sum")
    release = threading.Event()
    threading.Timer(0.1, made.die, (1,)).start()
    with pytest.raises(PeerLostError, match="rank 0: a sum cannot end: rank 1 is gone"):
        made.watches[0].watch_over(release.wait, "a sum")
    release.set()


def test_a_coordinator_that_comes_back_costs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is away for longer than anybody may be silent: nobody could hear, so nobody was silent."""
    monkeypatch.setattr(liveness_module, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(liveness_module, "LOST_SECONDS", 1.0)
    server = StoreServer(socket.create_server(("127.0.0.1", 0)), SECRET, tmp_path / "log")
    coordinator = Coordinator(address="127.0.0.1", port=server.port, secret=SECRET)
    watches = [Liveness(RemoteStore(coordinator), rank, 2) for rank in range(2)]
    for watch in watches:
        eventually(lambda watch=watch: not watch.missing())  # type: ignore[misc]
    server.close()
    time.sleep(1.5)
    server = StoreServer(socket.create_server(("127.0.0.1", server.port)), SECRET, tmp_path / "log")
    counts = [watch._peers[1 - rank].beat for rank, watch in enumerate(watches)]
    eventually(lambda: all(watch._peers[1 - rank].beat != counts[rank] for rank, watch in enumerate(watches)))
    assert [watch.lost() for watch in watches] == ["", ""]
    for watch in watches:
        watch.close()
    server.close()


def test_whoever_loses_the_coordinator_says_so_and_stops(ranks: Callable[..., Ranks]) -> None:
    made = ranks(2, Patience(refused=0.1))
    made.server.close()
    eventually(made.watches[1].lost)
    assert "no answer from the coordinator at 127.0.0.1" in made.watches[1].lost()
    assert "this rank may be the one that is cut off" in made.watches[1].lost()


def test_a_rank_that_takes_the_coordinator_with_it_is_named(ranks: Callable[..., Ranks]) -> None:
    made = ranks(3, Patience(refused=0.1), serving_rank=0)
    made.server.close()
    eventually(made.watches[2].lost)
    assert made.watches[2].lost().startswith("rank 0 is gone: its process ended, and the coordinator with it")


def test_a_rank_whose_own_link_may_be_down_does_not_blame_the_other_alone(ranks: Callable[..., Ranks]) -> None:
    lost = StoreLostError("no answer", Trouble.CUT_OFF)
    verdict = ranks(2, serving_rank=0).watches[1]._without_coordinator(lost)
    assert verdict is not None
    assert verdict.ranks == (0,)
    assert verdict.text.startswith(
        "rank 0 cannot be reached, and the coordinator with it: it stands still, or its link is down, or this host's "
        "own (no answer); last seen on host host0"
    )


@pytest.mark.parametrize(
    ("intervals", "limit"),
    [
        ([], LOST_SECONDS),
        ([0.5] * 30, LEAST_SILENCE_SECONDS),
        ([0.5, 0.8, 0.5, 0.8] * 8, LEAST_SILENCE_SECONDS),
        ([0.4, 1.1, 0.3, 1.2] * 8, LOST_SECONDS),
        ([0.9, 0.6, 1.3, 1.0, 0.7, 1.2] * 5, 0.95 + liveness_module.SPREADS * 0.3),
    ],
)
def test_how_much_silence_loses_a_rank_follows_its_beats(intervals: list[float], limit: float) -> None:
    peer = _Peer()
    now = 0.0
    for count, interval in enumerate([0.0, *intervals]):
        now += interval
        for _ in range(2):  # read twice, beaten once
            peer.note(Beat(count=count, num_exchanges=0, host=""), now)
    assert peer.silence_limit == pytest.approx(min(max(limit, LEAST_SILENCE_SECONDS), LOST_SECONDS))


def place(rank: int, world_size: int) -> Place:
    return Place(rank=rank, world_size=world_size, address="127.0.0.1", port=1, is_one_host=True, prefix="")


def test_late_ranks_are_named_while_they_are_waited_for(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "SAY_SECONDS", 0.05)
    caplog.set_level("INFO", logger="poseidon")
    made = ranks(1)
    first = Liveness(made.stores[0].clone(), 0, 4)
    waiter = threading.Thread(target=wait_for_all, args=(first, place(0, 4), "there"))
    waiter.start()
    eventually(lambda: "waiting for ranks 1, 2, 3 of 4 at there" in caplog.text)
    others = [Liveness(made.stores[0].clone(), rank, 4) for rank in (1, 3)]
    eventually(lambda: "waiting for rank 2 of 4 at there" in caplog.text)
    others.append(Liveness(made.stores[0].clone(), 2, 4))
    waiter.join(MOST_SECONDS)
    assert not waiter.is_alive()
    for watch in (first, *others):
        watch.close()


def test_one_that_came_and_ended_during_start_up_is_named_at_once(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ranks(1)
    first, second = (Liveness(made.stores[0].clone(), rank, 3) for rank in (0, 1))
    eventually(lambda: first.missing() == [2])
    second.close("ValueError: no such file")
    with pytest.raises(PeerLostError, match="rank 0: start-up cannot end: rank 1 ended with: ValueError"):
        wait_for_all(first, place(0, 3), "there")
    first.close()
