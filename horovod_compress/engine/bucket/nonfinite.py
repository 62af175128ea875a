"""What of one bucket is not finite on this rank: counted at the offers, told to all ranks in frame headers."""

from __future__ import annotations

import torch
from torch import Tensor

from ...exchange.device import Deadline, Device
from ...exchange.wire import NonFiniteCount
from ...schedule.plan import Bucket


class NonFinite:
    """The values of this step's gradients that are not finite, and the kept ones that were dropped so far."""

    def __init__(self, bucket: Bucket, rank: int, device: Device) -> None:
        self._bucket, self._rank, self._device = bucket, rank, device
        # Where counts are fetched to, once for all steps: memory that a device copies to takes long to get.
        self._fetched = device.host_zeros(len(bucket.tensors) if device.is_accelerator else 0, torch.int64)
        #: How many kept values were dropped as they were not finite, by tensor.
        self.dropped: dict[str, int] = {}
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        #: What the other ranks get.
        self.bad = NonFiniteCount()
        #: The tensors with such values.
        self.names: list[str] = []
        self._unread: list[tuple[list[int], Tensor]] = []
        self._zeroed = [0] * len(self._bucket.tensors)  # by position, as offers may come on several threads

    def add(self, counts: dict[int, int] | None) -> None:
        """Note values that are not finite, by position."""
        for position, count in (counts or {}).items():
            self.bad = self.bad.plus(NonFiniteCount(count, self._rank + 1))
            self.names.append(self._bucket.tensors[position].name)

    def add_unread(self, positions: list[int], counts: Tensor) -> None:
        """Note counts on a device whose streams need not be waited for yet."""
        self._unread.append((positions, counts))

    def let_be_zero(self, position: int, grad: Tensor, where: Tensor) -> None:
        """Let some values of a gradient be 0, and count them."""
        grad.masked_fill_(where, 0.0)
        self._zeroed[position] += int(where.sum())

    def read(self, deadline: Deadline) -> None:
        """Read all counts, as this thread's stream follows on the offers.

        Raises:
            ExchangeError: the device did not come to them before the deadline.
        """
        self.bad = self.bad.plus(NonFiniteCount(zeroed=sum(self._zeroed)))
        if not self._unread:
            return
        positions = [position for some, _ in self._unread for position in some]
        counts = [count.view(-1) for _, count in self._unread]
        self._device.keep(counts)
        found = counts[0] if len(counts) == 1 else torch.cat(counts)
        if self._device.is_accelerator:
            row = self._fetched[: len(positions)]
            self._device.copy(row, found)  # one copy for all
            self._device.wait(self._device.record_event(), deadline)
            found = row
        self.add({position: number for position, number in zip(positions, found.tolist(), strict=True) if number})
