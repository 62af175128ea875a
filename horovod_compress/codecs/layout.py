"""What a method needs of memory in one bucket, and how its payload may be cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..schedule.plan import Bucket
from .work import Part, Regions, Work, work_dtype


@dataclass(frozen=True)
class Cutting:
    """How tensors may be cut, to be decoded or encoded while other chunks are on their way.

    Attributes:
        granules: by position, of how many elements parts are multiples; the last one of a tensor may be shorter.
        needs: returns what a part needs of the payload: for each region, the first index and the end.
        encoding: parts may be encoded one by one too, else they are only decoded so.
    """

    granules: Sequence[int]
    needs: Callable[[Work, Part], dict[str, tuple[int, int]]]
    encoding: bool = False


@dataclass(frozen=True)
class Layout:
    """The arrays of one bucket: names, dtypes and lengths. The engine allocates them and puts them into ``Work``.

    Attributes:
        regions: the payload. Where payloads are gathered there is one array, "payload", of as many bytes as a payload
            may take.
        records: for regions that consist of records, how many elements make one. A record is handed to merging
            whole: a scale and its codes, for example.
        results: by region, the array that the owner of a chunk passes on in its place, if it does: payloads then merge
            better where one rank sees all of them. What becomes of a record lies at its place: the array is as many
            times as long as the region everywhere. ``fold`` writes it, and every rank finds all of it in
            ``Work.results``.
        carries: by region, how many rows of its type merging keeps for the next round. They belong to the places that
            this rank merges, not to parameters: other buckets, another number of ranks or another collective begin with
            zeros. See :mod:`horovod_compress.codecs.carry`.
        preludes: the arrays of each exchange before the payload's; names differ from the payload's. They are merged
            like the payload, with a key of rank 0: in rank order where they are small, else each chunk in its owner's
            order. If a gradient is not finite the rest of the round is left out on every rank.

        state: what is kept for every element from step to step. It is saved by parameter and follows the parameters to
            other buckets. A bucket that is not finite leaves it as it was.
        tables: what is kept from step to step for the bucket as a whole.
        local: what the codec needs beside the payload.
        scratch: likewise, where nothing is kept from one round to the next, so that other kinds of rounds may use the
            same memory; both are in ``Work.local``.
        cutting: how tensors may be cut; None where a bucket is encoded and decoded in one go.
        zero_groups: by position, of how many consecutive elements the result is 0 where all of them are, on every rank.
            1 where every exact zero stays one, and 0 where none does; that is so where nothing is said, but for methods
            that promise it, see ``Law.zeros``. Elements that have had no gradient yet are left out where some group has
            them among others.
    """

    regions: Regions = field(default_factory=dict)
    records: Mapping[str, int] = field(default_factory=dict)
    results: Regions = field(default_factory=dict)
    carries: Mapping[str, int] = field(default_factory=dict)
    preludes: tuple[Regions, ...] = ()

    state: Mapping[str, torch.dtype] = field(default_factory=dict)
    tables: Regions = field(default_factory=dict)
    local: Regions = field(default_factory=dict)
    scratch: Regions = field(default_factory=dict)
    cutting: Cutting | None = None
    zero_groups: Sequence[int] = ()


def per_element(bucket: Bucket, *names: str) -> dict[str, torch.dtype]:
    """Return state of the dtype of the bucket's arithmetic, such as "residual"."""
    return {name: work_dtype(bucket) for name in names}
