"""The turn of one bucket by itself: no reducer, no threads; and what tests change of turns."""

from __future__ import annotations

import pytest
from torch import Tensor

from horovod_compress.engine.buckets import BucketState as BucketState  # for tests of turns
from horovod_compress.engine.context import Context
from horovod_compress.engine.devices import Devices
from horovod_compress.engine.turn import NonFinite as NonFinite, Turn as Turn
from horovod_compress.exchange.transports.local import Hub
from horovod_compress.ops.keys import Key
from horovod_compress.options import Options


def turn_of(state: BucketState, key: Key, *, zero: bool = False) -> Turn:
    """Return a turn of a bucket in the step of a key.

    Args:
        zero: values that are not finite count as 0.
    """
    (transport,) = Hub(1).transports()
    options = Options(seed=key.seed, nonfinite="zero" if zero else "propagate")
    turn = Turn(state, Context(transport, options, Devices([])), 1.0, 1.0)
    turn.key, turn.round = key, state.round(key.step)
    return turn


def put(turn: Turn, position: int, grad: Tensor) -> int | Tensor:
    """Let a turn take one gradient, and return the count of its values that are not finite."""
    turn.claim(position)
    counts = turn.submit([position], [grad])
    turn.count_in([position], counts)
    return 0 if counts is None else counts[0]


def decode_in_parts(monkeypatch: pytest.MonkeyPatch, least: int = 0) -> None:
    """Let buckets be encoded and decoded part by part from so many elements on."""
    monkeypatch.setattr("horovod_compress.engine.bucket.memory.MIN_ELEMENTS", least)
