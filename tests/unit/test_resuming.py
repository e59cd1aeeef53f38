"""Commits and going on, on one rank: which state is taken, what is skipped aloud, and where there is no room."""

import itertools
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from poseidon.comm.group import Group
from poseidon.plan import uniform_plan
from poseidon.profile.structure import profile_structure
from poseidon.runtime import commits
from poseidon.runtime.attach import Run, attach
from poseidon.runtime.checkpoint import Shelf
from poseidon.runtime.memory import MemoryFolder


@pytest.fixture(autouse=True)
def _restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSEIDON_MEMORY", str(tmp_path / "memory"))
    monkeypatch.setenv("POSEIDON_MAX_RESTARTS", "1")
    start(monkeypatch, 0)


def start(monkeypatch: pytest.MonkeyPatch, attempt: int) -> None:
    """As in a new process."""
    monkeypatch.setattr(commits, "_numbers", itertools.count())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))


def make_run() -> Run:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return attach(model, torch.optim.Adam(model.parameters()), uniform_plan(profile_structure(model), 1), Group([]))


def make_steps(run: Run, count: int) -> None:
    assert run.optimizer is not None
    for _ in range(count):
        run.optimizer.zero_grad()
        run.model(torch.ones(4, 3)).square().mean().backward()
        run.optimizer.step()


def weights(run: Run) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()]).tolist()


def damage(shelf: Shelf, step: int) -> None:
    path = next(found for found in shelf.found() if found.step == step).file("model")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_job_that_starts_first_goes_on_from_nothing() -> None:
    run = make_run()
    assert run.resume() == 0
    assert run.resumption is None
    run.detach()


def test_the_newest_counts_and_what_is_damaged_is_skipped_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run()
    run.resume()
    expected = {}
    for step in (2, 4):
        make_steps(run, 2)
        run.save(tmp_path / "disk", wait=True)
        expected[step] = weights(run)
    make_steps(run, 2)
    run.commit()
    expected[6] = weights(run)
    make_steps(run, 1)
    run.detach()

    for step, place in ((6, "memory"), (4, str(tmp_path / "disk")), (2, str(tmp_path / "disk"))):
        start(monkeypatch, 1)
        run = make_run()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert run.resume(tmp_path / "disk") == step
        assert run.resumption is not None
        assert run.resumption.place == place
        assert weights(run) == expected[step]
        assert run.step == step
        assert f"going on at step {step} from {place}" in caplog.text
        if step == 6:
            assert run.resumption.lost_steps == 1
        else:
            assert "is skipped" in caplog.text
        run.detach()
        damage(Shelf(tmp_path / "memory" / "commits0" if step == 6 else tmp_path / "disk"), step)


def test_nothing_left_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run()
    run.resume()
    make_steps(run, 3)
    run.detach()
    start(monkeypatch, 1)
    run = make_run()
    with caplog.at_level(logging.WARNING):
        assert run.resume() == 0
    assert "nothing to go on from" in caplog.text
    assert "3 steps are lost" in caplog.text
    run.detach()


def test_a_first_start_takes_nothing_of_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    make_steps(run, 1)
    run.commit()
    run.detach()
    start(monkeypatch, 0)
    run = make_run()
    run.resume()
    run.detach()
    start(monkeypatch, 1)
    run = make_run()
    assert run.resume() == 0
    run.detach()


def test_too_little_memory_is_said_once_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(MemoryFolder, "free_bytes", lambda self: 10)
    run = make_run()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            make_steps(run, 1)
            assert not run.commit()
    assert caplog.text.count("not committed in memory from here on") == 1
    assert "10B are free there" in caplog.text
    run.detach()


def test_only_the_newest_commit_stays(tmp_path: Path) -> None:
    run = make_run()
    for _ in range(3):
        make_steps(run, 1)
        assert run.commit()
    run.detach()
    assert [found.step for found in Shelf(tmp_path / "memory" / "commits0").found()] == [3]
