"""Frames: nothing but the frame that is due passes."""

from __future__ import annotations

import pytest
import torch

from horovod_compress.errors import CorruptFrameError
from horovod_compress.exchange.wire import (
    GATHER,
    HEADER_BYTES,
    REDUCE,
    WIRE_VERSION,
    Address,
    FrameBuffer,
    NonFiniteCount,
    codec_id,
)

ADDRESS = Address(codec_id("marsit"), REDUCE, 3, 70_000, 5, 2, 1, 4)
BAD = NonFiniteCount(6, 2, 9)


def _payload(length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.int64).mul(37).to(torch.uint8)


def _frame(length: int = 40, address: Address = ADDRESS, bad: NonFiniteCount = BAD) -> FrameBuffer:
    frame = FrameBuffer(length)
    payload = _payload(length)
    assert frame.pack(address, bad, [payload[: length // 3], payload[length // 3 :]]).numel() == HEADER_BYTES + length
    return frame


@pytest.mark.parametrize("length", [0, 1, 7, 8, 64, 1000])
def test_round_trip(length: int) -> None:
    frame = _frame(length)
    assert frame.check(ADDRESS, length) == BAD
    assert torch.equal(frame.payload(0, length), _payload(length))


def test_a_larger_buffer_holds_a_shorter_frame() -> None:
    frame = FrameBuffer(1000)
    frame.memory.fill_(255)
    frame.pack(ADDRESS, NonFiniteCount(), [_payload(10)])
    assert frame.check(ADDRESS, 10) == NonFiniteCount()


@pytest.mark.parametrize("length", [0, 1, 40])
def test_every_single_bit_flip_is_detected(length: int) -> None:
    frame = _frame(length)
    assert frame.check(ADDRESS, length) == BAD
    for byte in range(HEADER_BYTES + length):
        for bit in range(8):
            frame.memory[byte] ^= 1 << bit
            with pytest.raises(CorruptFrameError):
                frame.check(ADDRESS, length)
            frame.memory[byte] ^= 1 << bit
    assert frame.check(ADDRESS, length) == BAD


def test_every_double_flip_in_the_header_is_detected() -> None:
    """CRC-32C promises it; a frame whose fields and checksum were both wrong could slip through."""
    frame = _frame(4)
    for first in range(0, 8 * HEADER_BYTES, 7):
        for second in range(first + 1, 8 * HEADER_BYTES, 13):
            for at in (first, second):
                frame.memory[at // 8] ^= 1 << at % 8
            with pytest.raises(CorruptFrameError):
                frame.check(ADDRESS, 4)
            for at in (first, second):
                frame.memory[at // 8] ^= 1 << at % 8


@pytest.mark.parametrize("length", range(40))
def test_a_truncated_frame_is_detected(length: int) -> None:
    """The rest of the buffer holds zeros, or what came before."""
    for rest in (0, 255):
        frame = _frame(40)
        frame.memory[HEADER_BYTES + length :] = rest
        with pytest.raises(CorruptFrameError, match="checksum"):
            frame.check(ADDRESS, 40)
    with pytest.raises(CorruptFrameError, match=f"payload length should be {length}, got 40"):
        _frame(40).check(ADDRESS, length)


@pytest.mark.parametrize(
    ("field", "value"),
    [("codec", codec_id("none")), ("phase", GATHER), ("sender", 2), ("step", 69_999), ("bucket", 6), ("hop", 1),
     ("chunk", 0), ("segment", 5)],
)  # fmt: skip
def test_a_frame_from_elsewhere_is_named(field: str, value: int) -> None:
    """A replayed step, a neighbour's bucket and the like: intact frames that are not due."""
    frame = _frame(40, ADDRESS._replace(**{field: value}))
    with pytest.raises(CorruptFrameError) as caught:
        frame.check(ADDRESS, 40)
    text = str(caught.value)
    assert f"{field} should be {getattr(ADDRESS, field)}, got {value}" in text
    assert "rank 3" in text and "step 70000" in text and "bucket 5" in text


def test_another_wire_version_is_named() -> None:
    frame = _frame()
    frame.memory[4] = WIRE_VERSION + 1
    with pytest.raises(CorruptFrameError, match=f"wire version should be {WIRE_VERSION}, got {WIRE_VERSION + 1}"):
        frame.check(ADDRESS, 40)


def test_steps_beyond_32_bits_wrap() -> None:
    late = ADDRESS._replace(step=(1 << 32) + 3)
    frame = _frame(8, late)
    assert frame.check(late, 8) == BAD
    with pytest.raises(CorruptFrameError, match="step"):
        frame.check(late._replace(step=4), 8)


def test_bad_counts_add_and_stop() -> None:
    assert NonFiniteCount().plus(NonFiniteCount()) == NonFiniteCount(0, 0)
    assert NonFiniteCount(2, 3).plus(NonFiniteCount(5, 2)) == NonFiniteCount(7, 2)
    assert NonFiniteCount(2, 3).plus(NonFiniteCount()) == NonFiniteCount(2, 3)
    assert NonFiniteCount(2, 3, 4).plus(NonFiniteCount(zeroed=5)) == NonFiniteCount(2, 3, 9)
    most = (1 << 32) - 1
    assert NonFiniteCount(most, 1, most).plus(NonFiniteCount(9, 4, 1)) == NonFiniteCount(most, 1, most)
    assert _frame(0, bad=NonFiniteCount(most, 1)).check(ADDRESS, 0) == NonFiniteCount(most, 1)


def test_codec_ids_differ() -> None:
    from horovod_compress.codecs.registry import methods

    names = [*methods(), "full precision", "verify"]
    assert len({codec_id(name) for name in names}) == len(names)
