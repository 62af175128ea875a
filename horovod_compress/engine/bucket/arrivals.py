"""Which parts of a bucket have to be encoded before which chunk is sent, and can be decoded when which has arrived.

Chunks are needed one after the other, and become complete one after the other, in orders that the
collective knows. A part of a tensor has to be encoded with the first chunk that holds some of its
payload, while earlier chunks are on their way; and can be decoded with the last such chunk, while
later ones are. All of this is known before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ...codecs.work import Cutting, Layout, Part, Work
from ...exchange.layout import chunk_bounds

#: Below this many elements a bucket is encoded and decoded in one go: the parts would cost more than they hide.
MIN_ELEMENTS = 1 << 18
#: Parts are cut so that a chunk holds about this many.
_PARTS_PER_CHUNK = 4


def decoded_by_chunk(layout: Layout, work: Work, order: list[int]) -> dict[int, list[Part]]:
    """Return what each chunk makes ready, all parts together covering the bucket; or nothing.

    Args:
        order: the chunks in the order in which they become complete on this rank.
    """
    return _by_chunk(layout, work, order, max)


def encoded_by_chunk(layout: Layout, work: Work, order: list[int]) -> dict[int, list[Part]]:
    """Return what each chunk needs that no earlier one did, all parts together covering the bucket; or nothing.

    Args:
        order: the chunks in the order in which this rank's payload is needed.
    """
    return _by_chunk(layout, work, order, min) if layout.cutting and layout.cutting.encoding else {}


def _by_chunk(
    layout: Layout, work: Work, order: list[int], choose: Callable[[Iterable[int]], int]
) -> dict[int, list[Part]]:
    cutting = layout.cutting
    if cutting is None or work.world == 1 or work.bucket.count < MIN_ELEMENTS:
        return {}
    turn = {chunk: number for number, chunk in enumerate(order)}
    found: dict[int, list[Part]] = {}
    for position in range(len(work.bucket.tensors)):
        for part in _cut(cutting, work, position):
            needs = cutting.needs(work, part)
            chunk = order[choose(turn[needed] for needed in _chunks_for(needs, layout.records, work))]
            _append(found.setdefault(chunk, []), part)
    return found


def _cut(cutting: Cutting, work: Work, position: int) -> list[Part]:
    tensor, granule = work.bucket.tensors[position], cutting.granules[position]
    least = work.bucket.count // (_PARTS_PER_CHUNK * work.world)
    size = granule * -(-least // granule)
    return [Part(position, at, min(at + size, tensor.count)) for at in range(0, tensor.count, size)]


def _chunks_for(needs: Mapping[str, tuple[int, int]], records: Mapping[str, int], work: Work) -> set[int]:
    """Return the chunks that hold what a part needs of the payload."""
    chunks: set[int] = set()
    for region, (start, stop) in needs.items():
        count, record = work.regions[region].numel(), records.get(region, 1)
        for chunk in range(work.world):
            low, high = chunk_bounds(count, chunk, work.world, record)
            if low < stop and start < high:
                chunks.add(chunk)
    return chunks


def _append(parts: list[Part], part: Part) -> None:
    """Add a part, joined with the one before where they touch."""
    last = parts[-1] if parts else None
    if last and last.position == part.position and last.stop == part.start:
        parts[-1] = Part(part.position, last.start, part.stop)
    else:
        parts.append(part)
