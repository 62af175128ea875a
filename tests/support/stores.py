"""Stores of torch.distributed, as one rank sees them."""

from __future__ import annotations

import time
from typing import Any


class SlowStore:
    """One whose rank is slow to read what others have shown, by so many seconds."""

    def __init__(self, store: Any, seconds: float) -> None:
        self._store, self._seconds = store, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def clone(self) -> SlowStore:
        return self

    def multi_get(self, keys: list[str]) -> list[bytes]:
        time.sleep(self._seconds)
        return self._store.multi_get(keys)  # type: ignore[no-any-return]
