"""A run that is saved and gone on with is the run that never paused: bit for bit, and on other numbers of ranks."""

from pathlib import Path

from tests.support.ranks import preload, run_ranks
from tests.support.resuming import CASES, interrupted

preload("tests.support.resuming")


def resume_all(rank: int, world_size: int, folder: Path, names: list[str], before: int, after: int) -> dict[str, str]:
    cases = [(name, CASES[name]) for name in names if CASES[name].min_ranks <= world_size]
    return {name: interrupted(rank, case, folder / str(n), before, after) for n, (name, case) in enumerate(cases)}


def test_every_scheme_goes_on_bit_for_bit(tmp_path: Path) -> None:
    for differences in run_ranks(2, resume_all, tmp_path, list(CASES), 6, 6):
        assert differences == {name: "" for name, case in CASES.items() if case.min_ranks <= 2}
