"""Writers that are killed at random moments of saving: a reader always finds what was complete before."""

from pathlib import Path

import pytest
from benchmarks.saving import kill_while_saving

from poseidon.units import KIB
from support.ranks import preload

preload("benchmarks.saving")
pytestmark = [pytest.mark.multiprocess, pytest.mark.alone]


def test_whatever_is_found_is_complete_and_nothing_reported_is_lost(tmp_path: Path) -> None:
    tally = kill_while_saving(tmp_path / "checkpoints", 2, 8, 256 * KIB)
    assert tally.problems == []
    assert tally.sound == tally.kills == 8
    assert tally.steps > 8
    assert sum(tally.moments.values()) == 8
