"""Several waits share one limit."""

from __future__ import annotations

import pytest

from horovod_compress.exchange import deadline


def test_each_wait_has_what_the_ones_before_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(deadline.time, "monotonic", lambda: now[0])
    limit = deadline.Deadline(5.0)
    assert limit.left() == 5.0
    now[0] += 2.0
    assert limit.left() == 3.0
    now[0] += 9.0
    assert limit.left() == 0.0 and limit.seconds == 5.0
