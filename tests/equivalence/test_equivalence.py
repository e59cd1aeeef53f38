"""Every situation under every scheme on one to four ranks: equal to one process, the same bits on every rank."""

from pathlib import Path

import pytest
from tests.equivalence.harness import Combination
from tests.equivalence.outcomes import WORLD_SIZES, combinations, problem, verdicts
from tests.equivalence.situations import FAMILIES
from tests.equivalence.table import rows_of_page, title

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[2] / "docs" / "equivalence.md"
CASES = [
    pytest.param(
        family,
        world_size,
        combination,
        id="-".join((*combination, str(world_size))),
        marks=pytest.mark.xdist_group(f"equivalence-{family}-{world_size}"),
    )
    for family in FAMILIES
    for world_size in WORLD_SIZES
    for combination in combinations(family, world_size)
]


@pytest.mark.parametrize(("family", "world_size", "combination"), CASES)
def test_equals_one_process(family: str, world_size: int, combination: Combination):
    found = problem(combination, world_size, verdicts(family, world_size)[combination])
    assert not found, found


def test_page_has_every_situation():
    expected = [title(situation) for situations in FAMILIES.values() for situation in situations.values()]
    assert rows_of_page(PAGE.read_text(encoding="utf-8")) == expected, (
        "python -m tests.equivalence.table docs/equivalence.md"
    )
