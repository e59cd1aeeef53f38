"""Every situation under every scheme on one to four ranks: equal to one process, the same bits on every rank."""

import pytest
from tests.equivalence.harness import Combination
from tests.equivalence.outcomes import combinations, verdicts
from tests.equivalence.situations import FAMILIES, SITUATIONS

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

WORLD_SIZES = (1, 2, 3, 4)


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
    verdict = verdicts(family, world_size)[combination]
    situation = SITUATIONS[combination.situation]
    refusal = situation.refused.get(combination.scheme)
    assert not verdict.failure, verdict.failure
    if refusal is not None and world_size > 1:
        assert refusal in verdict.refusal
        return
    assert not verdict.refusal, verdict.refusal
    assert verdict.same_bits, "the ranks differ"
    assert verdict.error <= situation.tolerance, f"{verdict.where}: relative error {verdict.error:.1e}"
