"""The devices that a rank's buckets are on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from ..errors import ExchangeError
from ..exchange import device
from ..exchange.device import Deadline, Device


class Devices(dict[str, Device]):
    """The devices that a rank's buckets are on, by name.

    Args:
        names: of the devices; a name may come several times.
        make: makes a device; tests have devices of their own.
    """

    def __init__(self, names: Iterable[str], make: Callable[[str], Device] | None = None) -> None:
        super().__init__({name: (make or device.of)(name) for name in device.check(names)})

    @contextlib.contextmanager
    def on(self, work: str) -> Iterator[None]:
        """Do one thread's work, "exchanging" or "decoding", on its own streams."""
        with contextlib.ExitStack() as stack:
            for where in self.values():
                stack.enter_context(getattr(where, work)())
            yield

    def synchronize(self) -> None:
        """Wait until nothing is queued anywhere."""
        for where in self.values():
            where.synchronize()

    def come_to_rest(self, seconds: float, queueing: Callable[[], bool]) -> bool:
        """Wait until nothing is queued on our streams: the allocator knows only of the one that asked for memory.

        Args:
            queueing: returns whether a thread may queue more; asked at the end.

        Returns:
            Whether it is so.
        """
        deadline = Deadline(seconds)
        try:
            for where in self.values():
                for own in (where.exchanging, where.decoding, where.moving):
                    with own():
                        where.wait(where.record_event(), deadline)
        except (ExchangeError, RuntimeError):  # CUDA's errors are the latter
            return False
        return not (queueing() and any(where.is_accelerator for where in self.values()))
