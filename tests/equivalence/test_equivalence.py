"""Every situation under every scheme: equal to one process, the same bits on every rank.

Each scheme on two ranks or on three; on one what a run without a network does, on four what two hosts of two ranks do.
With `--thorough`, as for the page, everything on one to four.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet
from tests.equivalence.harness import Combination
from tests.equivalence.outcomes import WORLD_SIZES, combinations, problem, verdicts
from tests.equivalence.situations import FAMILIES
from tests.equivalence.table import rows_of_page, title

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[2] / "docs" / "equivalence.md"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "combination" in metafunc.fixturenames:
        every = metafunc.config.getoption("--thorough")
        metafunc.parametrize(("family", "world_size", "combination", "every"), list(cases(every=every)))


def cases(*, every: bool) -> Iterator[ParameterSet]:
    for family in FAMILIES:
        for world_size in WORLD_SIZES:
            for combination in combinations(family, world_size, every=every):
                yield pytest.param(
                    family,
                    world_size,
                    combination,
                    every,
                    id="-".join((*combination, str(world_size))),
                    marks=pytest.mark.xdist_group(f"equivalence-{family}-{world_size}"),
                )


def test_equals_one_process(family: str, world_size: int, combination: Combination, every: bool):
    found = problem(combination, world_size, verdicts(family, world_size, every=every)[combination])
    assert not found, found


def test_page_has_every_situation():
    expected = [title(situation) for situations in FAMILIES.values() for situation in situations.values()]
    assert rows_of_page(PAGE.read_text(encoding="utf-8")) == expected, (
        "python -m tests.equivalence.table docs/equivalence.md"
    )
