"""Several waits share one limit."""

from __future__ import annotations

import pytest

from horovod_compress.exchange import device


def test_each_wait_has_what_the_ones_before_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(device.time, "monotonic", lambda: now[0])
    limit = device.Deadline(5.0)
    assert limit.left() == 5.0
    now[0] += 2.0
    assert limit.left() == 3.0
    now[0] += 9.0
    assert limit.left() == 0.0 and limit.seconds == 5.0
