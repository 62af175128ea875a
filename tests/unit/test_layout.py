"""Layouts: chunks and segments cover every element of every region exactly once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from horovod_compress.exchange.collective import MAX_SEGMENTS, MIN_SEGMENT_BYTES, Partition

_DTYPES = st.sampled_from([torch.int64, torch.float32, torch.float16, torch.uint8, torch.float64])
_LENGTHS = st.one_of(st.integers(0, 300), st.sampled_from([65_536, 100_003, 1_000_000]))


def _check(regions: dict[str, torch.Tensor], world: int) -> Partition:
    layout = Partition.of(regions, world)
    assert len(layout.chunks) == world
    for name, tensor in regions.items():
        covered = torch.zeros(tensor.numel(), dtype=torch.int32)
        for chunk in layout.chunks:
            for segment in chunk:
                for piece in segment.pieces:
                    if piece.region == name:
                        covered[piece.start : piece.stop] += 1
                        assert piece.values.data_ptr() == tensor[piece.start :].data_ptr()
                        assert piece.values.numel() == piece.stop - piece.start > 0
                        assert piece.data.numel() == piece.values.nbytes
        assert bool((covered == 1).all())
    for chunk in layout.chunks:
        for segment in chunk:
            at = 0
            for piece in segment.pieces:
                assert piece.at == at
                # A received piece is viewed in its dtype where it lies in the frame.
                assert piece.at % piece.values.element_size() == 0 or len(segment.pieces) > 1
                at += piece.data.numel()
            assert at == segment.nbytes <= layout.segment_bytes
    assert max(len(chunk) for chunk in layout.chunks) == layout.most_segments
    # Every cut may waste less than one element, which can cost one segment more.
    assert 1 <= layout.most_segments <= MAX_SEGMENTS + 1
    sizes = [sum(segment.nbytes for segment in chunk) for chunk in layout.chunks]
    total = sum(tensor.nbytes for tensor in regions.values())
    assert max(sizes) <= total / world + sum(tensor.element_size() for tensor in regions.values())
    return layout


@given(kinds=st.lists(st.tuples(_DTYPES, _LENGTHS), min_size=1, max_size=3), world=st.integers(1, 9))
def test_every_element_once(kinds: list[tuple[torch.dtype, int]], world: int) -> None:
    _check({f"r{i}": torch.zeros(length, dtype=dtype) for i, (dtype, length) in enumerate(kinds)}, world)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 64])
@pytest.mark.parametrize("count", [0, 1, 63, 65, 5_000_000])
def test_sizes_that_occur(world: int, count: int) -> None:
    bits, steps = torch.zeros(-(-count // 64), dtype=torch.int64), torch.zeros(count // 256)
    _check({"bits": bits, "steps": steps}, world)
    _check({"values": torch.zeros(count)}, world)


@given(count=st.integers(0, 2000), record=st.sampled_from([4, 132, 516, 100_000]), world=st.integers(1, 9))
def test_records_stay_whole(count: int, record: int, world: int) -> None:
    regions = {"records": torch.zeros(min(count, 3_000_000 // record) * record, dtype=torch.uint8)}
    layout = Partition.of(regions, world, {"records": record})
    pieces = [piece for chunk in layout.chunks for segment in chunk for piece in segment.pieces]
    assert sum(piece.stop - piece.start for piece in pieces) == regions["records"].numel()
    assert all(piece.start % record == piece.stop % record == 0 for piece in pieces)


def test_large_chunks_are_cut_and_small_ones_are_not() -> None:
    elements = MIN_SEGMENT_BYTES // 4
    assert _check({"values": torch.zeros(2 * elements)}, 2).most_segments == 1
    assert _check({"values": torch.zeros(2 * elements + 2)}, 2).most_segments == 2
    huge = _check({"values": torch.zeros(100 * elements)}, 2)
    assert huge.most_segments == MAX_SEGMENTS


def test_an_empty_chunk_still_sends_one_frame() -> None:
    layout = _check({"values": torch.zeros(1)}, 3)
    assert [len(chunk) for chunk in layout.chunks] == [1, 1, 1]
    assert sorted(chunk[0].nbytes for chunk in layout.chunks) == [0, 0, 4]
