"""What this rank sends through Gloo, as hashes: payloads of runs that should be equal are compared in every byte."""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from horovod_compress.exchange.transports.gloo import GlooTransport

EVERYONE = -1  # the peer of sums that Gloo itself makes


class Sent:
    """A hash for each peer: what goes to one peer has an order, what goes to two has none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hashes: dict[int, Any] = defaultdict(hashlib.sha256)

    def add(self, data: Tensor, peer: int) -> None:
        raw = data.detach().contiguous().view(-1).view(torch.uint8).numpy()
        with self._lock:
            self._hashes[peer].update(raw.data)

    def take(self) -> dict[str, str]:
        """Return the hashes since the last call, and begin anew."""
        with self._lock:
            found, self._hashes = self._hashes, defaultdict(hashlib.sha256)
        return {str(peer): found[peer].hexdigest()[:16] for peer in sorted(found)}


@contextmanager
def recorded() -> Iterator[Sent]:
    """Record what all transports over Gloo send that are made now or later."""
    sent, send, add_up = Sent(), GlooTransport.send, GlooTransport.add_up

    def sending(transport: GlooTransport, data: Tensor, to: int) -> Any:
        sent.add(data, to)
        return send(transport, data, to)

    def adding_up(transport: GlooTransport, data: Tensor, deadline: Any) -> Any:
        sent.add(data, EVERYONE)
        return add_up(transport, data, deadline)

    with mock.patch.object(GlooTransport, "send", sending), mock.patch.object(GlooTransport, "add_up", adding_up):
        yield sent
