"""The harness notices what is not equal, and what fails is not the end of the others."""

import pytest
from tests.equivalence.harness import Combination
from tests.equivalence.outcomes import judge, problem

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

EXPECTED = {
    "WrongMean": "relative error 1",
    "OneBitOff": "the ranks differ",
    "RaisesOnOneRank": "this rank has had enough",
    "NotComparedOnRanks": "relative error inf",
    "Plain": "",
}


def test_what_is_not_equal_is_noticed():
    combinations = [Combination(situation, "all_reduce") for situation in EXPECTED]
    verdicts = judge(combinations, world_size=2)
    assert list(verdicts) == combinations
    for combination, verdict in verdicts.items():
        found, expected = problem(combination, 2, verdict), EXPECTED[combination.situation]
        assert (expected in found) if expected else not found, combination


def test_after_many_failures_the_rest_is_not_run():
    combinations = [Combination("RaisesOnOneRank", "all_reduce")] * 2 + [Combination("Plain", "all_reduce")]
    verdicts = judge(combinations, world_size=2, most_failures=1)
    assert verdicts[combinations[2]].failure == "not run: 1 others failed before it"
