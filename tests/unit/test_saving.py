"""Saving: who is waited for, and what stays where training has gone back."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from poseidon.errors import PeerLostError
from poseidon.runtime import saving
from poseidon.runtime.checkpoint import Found, Shelf
from poseidon.runtime.saving import Keep, Saver, Saving


def save(shelf: Shelf, step: int) -> Found:
    draft = shelf.begin(step)
    return draft.seal([draft.write("model", {"step": step})], {"world_size": 1})


def steps(shelf: Shelf) -> list[int]:
    return [found.step for found in shelf.found()]


@pytest.fixture
def stuck() -> Iterator[threading.Thread]:
    """A thread that waits for a rank that does not answer."""
    answer = threading.Event()
    thread = threading.Thread(target=answer.wait, daemon=True)
    thread.start()
    yield thread
    answer.set()
    thread.join()


def test_a_checkpoint_that_a_lost_rank_holds_up_is_not_waited_for(
    stuck: threading.Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "LOOK_SECONDS", 0.01)
    verdicts = iter(["", "", "rank 1 is gone"])
    liveness = SimpleNamespace(lost=lambda: next(verdicts))
    run: Any = SimpleNamespace(group=SimpleNamespace(rank=0, liveness=liveness))
    saver = Saver(run)
    saver._thread, saver._saving = stuck, Saving(30)
    with pytest.raises(PeerLostError, match="rank 0: saving the state after step 30 failed: rank 1 is gone"):
        saver.finish()


def test_a_damaged_one_that_training_went_back_behind_takes_no_place(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    save(shelf, 650)
    damaged = save(shelf, 700).file("model")
    damaged.write_bytes(bytes(damaged.stat().st_size))  # only its checksum tells
    save(shelf, 660)
    saving._prune(shelf, 660, Keep(last=1))
    assert steps(shelf) == [660]


def test_what_training_went_back_behind_is_set_aside_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf(tmp_path)
    for step in (500, 600, 700, 550):
        save(shelf, step)
    saving._prune(shelf, 550, Keep(last=2))
    assert steps(shelf) == [550, 500]
    assert "went back to step 550" in caplog.text
    assert "step-000000600.aside, step-000000700.aside" in caplog.text
