"""What tells ranks of a job from others that have connected: each proves that it knows what the ranks have shown.

Gloo takes whoever sends the number of a connection for a rank, and the numbers can be guessed. So every rank shows the
others a secret where it shows its address, and the first message over each connection is a digest of the secrets of
its two ends. Whoever has not seen both cannot answer, and the start fails.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ...errors import ExchangeError

_TAG = 0x48564352
_BYTES = 32


class Proof:
    """One rank's part, in one group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._secrets: dict[int, bytes] = {}

    def shown(self) -> dict[str, bytes]:
        """Return what to show the other ranks, by key."""
        return {_key(self._rank): secrets.token_bytes(_BYTES)}

    def see(self, found: Mapping[str, bytes]) -> None:
        """Take note of what all ranks have shown."""
        self._secrets = {rank: found[_key(rank)] for rank in range(self._size)}

    def check(self, group: Any, left: Callable[[], timedelta]) -> None:
        """Exchange proofs with all others, as the first messages of a group.

        Args:
            left: returns how long that may still take.

        Raises:
            ExchangeError: somebody has none, or none has come in time.
        """
        peers = [peer for peer in range(self._size) if peer != self._rank]
        found = {peer: torch.zeros(_BYTES, dtype=torch.uint8) for peer in peers}
        mine = {peer: self._digest(self._rank, peer) for peer in peers}
        works, about = [], peers[0] if peers else 0
        try:
            for about in peers:
                works.append((about, group.recv([found[about]], about, _TAG)))
                works.append((about, group.send([mine[about]], about, _TAG)))
            for about, work in works:  # noqa: B007  the error names it
                work.wait(left())
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            why = "did not answer in time" if "timed out" in text.lower() else "has ended"
            raise ExchangeError(
                f"rank {self._rank}: rank {about} {why} while ranks connected, or somebody outside the job has taken "
                f"its place: {text}; create the compression again on every rank"
            ) from None
        for peer in peers:
            if not torch.equal(found[peer], self._digest(peer, self._rank)):
                raise ExchangeError(
                    f"rank {self._rank}: somebody outside the job has connected in place of rank {peer}; create the "
                    "compression again on every rank, and keep the job's ports out of the reach of others"
                )

    def _digest(self, sender: int, receiver: int) -> Tensor:
        text = b"".join([self._secrets[sender], self._secrets[receiver], b"%d %d" % (sender, receiver)])
        return torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.uint8)


def _key(rank: int) -> str:
    return f"hvc/secret/{rank}"
