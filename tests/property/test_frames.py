"""Frames: what is written is read whole, whatever the pieces it comes in; anything else is a FrameError."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.comm.frames import (
    MAX_BODY_BYTES,
    MAX_ITEMS,
    FrameError,
    FrameReader,
    FrameWriter,
    Message,
    Op,
    decode,
    encode,
)

KEY = bytes(32)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
messages = st.builds(
    Message,
    st.sampled_from(Op),
    st.integers(0, 2**64 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.lists(texts, max_size=4).map(tuple),
    st.lists(st.binary(max_size=80), max_size=4).map(tuple),
)


@given(messages)
def test_what_is_encoded_is_decoded(message: Message) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_an_error(body: bytes) -> None:
    try:
        message = decode(body)
    except FrameError:
        return
    assert encode(message) == body


@given(st.lists(messages, max_size=4), st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_frames_come_whole_out_of_any_pieces(sent: list[Message], sizes: list[int]) -> None:
    writer, reader = FrameWriter(KEY), FrameReader(KEY)
    stream = b"".join(writer.write(message) for message in sent)
    received = []
    for size in itertools.cycle(sizes):
        received += reader.feed(stream[:size])
        stream = stream[size:]
        if not stream:
            break
    assert received == sent
    assert reader.num_held == 0


@given(messages, st.data())
def test_a_changed_frame_is_refused(message: Message, data: st.DataObject) -> None:
    frame = bytearray(FrameWriter(KEY).write(message))
    place = data.draw(st.integers(0, len(frame) - 1))
    frame[place] ^= 1 << data.draw(st.integers(0, 7))
    reader = FrameReader(KEY)
    try:
        assert reader.feed(bytes(frame)) == []  # its length says that more is to come
    except FrameError:
        with pytest.raises(FrameError):
            reader.feed(b"")


@given(st.binary(max_size=200))
def test_a_stream_of_anything_is_refused_or_waits(stream: bytes) -> None:
    reader = FrameReader(KEY)
    try:
        assert reader.feed(stream) == []
    except FrameError:
        assert reader.num_held == 0


def test_a_frame_counts_once_in_its_session_and_direction() -> None:
    frame = FrameWriter(KEY).write(Message(Op.CHECK))
    reader = FrameReader(KEY)
    assert len(reader.feed(frame)) == 1
    with pytest.raises(FrameError, match="frame 0 where number 1 is due"):
        reader.feed(frame)
    with pytest.raises(FrameError, match="wrong tag"):
        FrameReader(b"\1" * 32).feed(frame)


def test_a_length_is_refused_before_the_body_comes() -> None:
    frame = bytearray(FrameWriter(KEY).write(Message(Op.SET)))
    frame[6:10] = (MAX_BODY_BYTES + 1).to_bytes(4, "big")
    with pytest.raises(FrameError, match=f"{MAX_BODY_BYTES + 1} bytes: at most {MAX_BODY_BYTES}"):
        FrameReader(KEY).feed(bytes(frame[:20]))


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (Message(Op.SET, values=(bytes(MAX_BODY_BYTES),)), "bytes at once"),
        (Message(Op.CHECK, keys=("k",) * (MAX_ITEMS + 1)), "16385 keys"),
        (Message(Op.CHECK, keys=("k" * 1025,)), "a key of 1025 bytes"),
        (Message(Op.CHECK, keys=("\ud800",)), "no text"),
        (Message(Op.ADD, amount=2**63), "more than 64 bits"),
    ],
)
def test_what_does_not_fit_is_not_sent(message: Message, what: str) -> None:
    with pytest.raises(FrameError, match=what):
        encode(message)
