"""What a rank knows about its host."""

from pathlib import Path

from poseidon.runtime.host_facts import _free


def test_free_room_is_that_of_the_folder_above_where_a_folder_cannot_be_looked_at(tmp_path: Path) -> None:
    unseen = tmp_path / ("x" * 300)  # no name may be so long: the system refuses, as with a folder closed to this user
    assert _free(unseen / "checkpoints") is not None
    assert _free(tmp_path / "a" / "b") is not None
