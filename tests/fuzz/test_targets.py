"""Each reader of bytes from outside, on anything and on what is nearly right; `fuzz_*.py` go further, with coverage."""

import os
import shutil
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.targets import FOLDER, TARGETS, Target

EXAMPLES = 60


@pytest.fixture(scope="module", autouse=True)
def no_files() -> Iterator[None]:
    FOLDER.mkdir(exist_ok=True)
    yield
    shutil.rmtree(FOLDER)


@st.composite
def nearly_right(draw: st.DrawFn, target: Target) -> bytes:
    """Something in order in which bytes were changed, left out, repeated or put in, or whose end is missing."""
    data = bytearray(draw(st.sampled_from(target.examples)))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        stop = min(len(data), start + draw(st.integers(0, 12)))
        repeated = bytes(data[start:stop]) * draw(st.integers(0, 3))
        data[start:stop] = draw(st.sampled_from((repeated, draw(st.binary(max_size=12)), b"\xff" * (stop - start))))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_give_a_value_or_an_error_of_ours(name: str) -> None:
    target = TARGETS[name]
    for example in target.examples:
        target.read(example)

    @settings(max_examples=EXAMPLES)
    @given(st.binary(max_size=300) | nearly_right(target))
    def check(data: bytes) -> None:
        target.read(data)

    check()


def test_the_scripts_name_their_targets() -> None:
    folder = os.path.dirname(__file__)
    scripts = {name for name in os.listdir(folder) if name.startswith("fuzz_")}
    assert scripts == {"fuzz_frames.py", "fuzz_files.py", "fuzz_checkpoints.py"}
