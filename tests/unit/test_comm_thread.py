"""What becomes of an error in a communication thread."""

import pytest

from poseidon.comm.group import Group
from poseidon.comm.scheme import Transfer
from poseidon.errors import CommError
from poseidon.runtime.comm_thread import CommThread


def test_whatever_goes_wrong_in_a_thread_reaches_the_training_thread() -> None:
    threads = CommThread(Group([]))
    transfer = Transfer("a push", lambda: {}["no such key"])  # type: ignore[no-any-return]
    transfer.mark_ready()
    threads.begin([transfer])
    with pytest.raises(CommError, match="a communication thread failed: KeyError: 'no such key'") as caught:
        threads.wait(transfer)
    assert isinstance(caught.value.__cause__, KeyError)
    threads.close()
