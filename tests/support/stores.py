"""Stores of torch.distributed, as one rank sees them."""

from __future__ import annotations

import time
from typing import Any


class SlowStore:
    """One whose rank is slow to read what others have shown, or to show something, by so many seconds.

    Attributes:
        shows_late: seconds, by how a value ends.
        reads: it does so just now.
    """

    def __init__(self, store: Any, seconds: float) -> None:
        self._store, self.seconds = store, seconds
        self.shows_late: dict[bytes, float] = {}
        self.reads = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def clone(self) -> SlowStore:
        return self

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.reads = True
        time.sleep(self.seconds)
        found: list[bytes] = self._store.multi_get(keys)
        self.reads = False
        return found

    def set(self, key: str, value: bytes) -> None:
        time.sleep(sum(seconds for end, seconds in self.shows_late.items() if value.endswith(end)))
        self._store.set(key, value)
