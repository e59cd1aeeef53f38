"""When a training commits and saves, and what it needs to go on."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from poseidon.errors import CheckpointError, ConfigError
from poseidon.runtime.cursor import Cursor, Fit
from poseidon.runtime.keeping import Every, Keeper, Keeping, steps_between


def make_cursor(num_samples: int = 100, seed: int = 3, world_size: int = 3) -> Cursor:
    return Cursor(
        num_samples=num_samples, seed=seed, global_batch_size=8 * world_size, samples_per_pass=8, world_size=world_size
    )


@pytest.mark.parametrize(
    ("text", "steps", "seconds"),
    [("500steps", 500, None), ("1 step", 1, None), ("10min", None, 600.0), ("2s", None, 2)],
)
def test_an_interval_is_in_steps_or_in_seconds(text: str, steps: int | None, seconds: float | None) -> None:
    assert Every.parse(text) == Every(steps=steps, seconds=seconds)


@pytest.mark.parametrize("text", ["", "10", "0steps", "0s", "-3steps", "ten minutes", "5 epochs", "1.5steps"])
def test_what_is_no_interval_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="as an interval"):
        Every.parse(text)


def test_an_interval_is_over_by_its_own_measure() -> None:
    assert Every(steps=5).is_over(steps=5, seconds=0.0)
    assert not Every(steps=5).is_over(steps=4, seconds=1e9)
    assert Every(seconds=5.0).is_over(steps=1, seconds=5.0)
    assert not Every(seconds=5.0).is_over(steps=10**9, seconds=4.9)


@pytest.mark.parametrize(
    ("stall", "step", "steps"),
    [
        (0.002, 0.1, 2),  # 2 ms are a hundredth of two steps
        (0.0, 0.1, 1),
        (0.1, 0.5, 20),
        (100.0, 0.5, 60),  # however dear: every half minute
        (1.0, 45.0, 1),  # a step that is longer than that
    ],
)
def test_commits_cost_a_hundredth_but_are_never_far_apart(stall: float, step: float, steps: int) -> None:
    assert steps_between(stall, step) == steps


def test_a_cursor_goes_on_where_another_stood() -> None:
    there, here = make_cursor(), make_cursor(world_size=2)
    there.epoch, there.num_seen, there.num_steps, there.scores = 2, 48, 14, {"accuracy": 0.5}
    here.load_state_dict(there.state_dict())
    assert here.state_dict() == there.state_dict()
    assert here.global_batch_size == 24


@pytest.mark.parametrize("other", [{"num_samples": 99}, {"seed": 4}])
def test_a_cursor_is_not_taken_to_other_data(other: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match="cannot go on with the training"):
        make_cursor(**other).load_state_dict(make_cursor().state_dict())


@pytest.mark.parametrize(
    ("world_size", "local", "passes"), [(1, 24, 3), (2, 12, 2), (3, 8, 1), (4, 6, 1), (24, 1, 1), (30, 1, 1)]
)
def test_the_global_batch_stays_whatever_the_ranks(world_size: int, local: int, passes: int) -> None:
    fit = Fit.of(make_cursor(world_size=3), world_size)
    assert (fit.global_batch_size, fit.local_batch_size, fit.num_passes) == (24, local, passes)


@pytest.mark.parametrize(
    ("commits", "folder", "ranks", "done"),
    [
        (True, None, (), []),
        (False, None, (), []),
        (False, None, (1,), ["commit"]),  # nowhere else
        (False, Path("out"), (1,), ["save"]),
        (True, None, (1,), ["commit"]),
        (True, Path("out"), (1,), ["commit", "save"]),  # the commit returns where memory is short
    ],
)
def test_the_state_is_kept_at_once_where_ranks_leave(
    commits: bool, folder: Path | None, ranks: tuple[int, ...], done: list[str]
) -> None:
    seen: list[str] = []
    run: Any = SimpleNamespace(
        leaving=SimpleNamespace(ranks=ranks),
        commit=lambda: seen.append("commit"),
        save=lambda *_, **__: seen.append("save"),
    )
    ledger: Any = SimpleNamespace(clock=0.0, combine=lambda: None, note_stall=lambda _: None)
    seldom = Every(steps=1000)
    keeping = Keeping(commits=commits, folder=folder, commit_every=seldom, save_every=seldom)
    Keeper(run, make_cursor(), ledger, keeping).after_step()
    assert seen == done
