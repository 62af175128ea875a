"""How Gloo's connections find each other without a server: a store that is no more than one exchange of addresses.

Gloo writes where this rank listens, and then reads where the others do. With the first read, every rank shows all
others what it has written, in whatever way the framework brings it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

#: Shows some bytes by key to all ranks, and returns those of all.
Share = Callable[[dict[str, bytes]], dict[str, bytes]]


class Addresses(dist.Store):
    """The store of one group.

    Attributes:
        problem: what sharing failed with, if it did.
    """

    def __init__(self, share: Share) -> None:
        super().__init__()
        self._share, self._values = share, {}  # type: tuple[Share, dict[str, bytes]]
        self._shared = False
        self.problem: Exception | None = None

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value if isinstance(value, bytes) else value.encode("latin1")

    def get(self, key: str) -> bytes:
        self._learn([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        self._learn(keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._learn(keys)
        return [self._values[key] for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def _learn(self, keys: Sequence[str]) -> None:
        if not self._shared and not self.check(keys):
            self._shared = True
            try:
                self._values |= self._share(dict(self._values))
            except Exception as error:
                self.problem = error  # on its way through C++ it would become another one
                raise
        if missing := [key for key in keys if key not in self._values]:
            raise RuntimeError(f"no rank advertised the address {missing[0]!r}")
