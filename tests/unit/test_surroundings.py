"""Which name tells a host from the others."""

import pytest

from poseidon.runtime.surroundings import name_hosts


def said(*ranks):
    return [dict(zip(("node", "name", "listed"), rank, strict=True)) for rank in ranks]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([("0", "ant", ""), ("0", "ant", ""), ("1", "bee", "")], {"ant": [0, 1], "bee": [2]}),
        ([("0", "box", "left"), ("1", "box", "right")], {"left": [0], "right": [1]}),
        ([("0", "box", "left"), ("1", "box", "")], {"host0": [0], "host1": [1]}),
        ([("0", "box", "x"), ("1", "box", "x")], {"host0": [0], "host1": [1]}),
        ([("box", "box", ""), ("box", "box", "")], {"box": [0, 1]}),
    ],
)
def test_hosts_go_by_their_own_name_their_listed_name_or_their_number(ranks, expected):
    assert name_hosts(said(*ranks)) == expected
