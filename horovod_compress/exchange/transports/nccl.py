"""Bytes between GPUs through NCCL's sends and receives, and everything small through another transport.

Payloads go from GPU memory to GPU memory. What is a *token*, a few bytes that the CPU has to look at (handshakes,
counts, lengths, hashes, notes on failures), stays on the CPU and goes through the transport that NCCL is put beside:
it also notices dead peers at once, which NCCL does not.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...errors import ExchangeError
from ..device import Deadline, Device
from .transport import NcclLink, Pending, Transport


def why_not() -> str | None:
    """Return what is missing here for NCCL, in words, or None if nothing is."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: make setup CUDA=1, or pip install cupy-cuda13x"
    try:
        found = api()
    except Exception as error:  # noqa: BLE001  a broken installation fails in many ways
        return f"cupy.cuda.nccl does not import: {type(error).__name__}: {error}"
    return None if found.available else "libnccl was not found: pip install nvidia-nccl-cu13"


def api() -> Any:
    """Return CuPy's module. Torch, imported above, has brought the libnccl that this finds in the process."""
    return importlib.import_module("cupy.cuda.nccl")


class NcclTransport:
    """A link for payloads beside a transport for tokens.

    Args:
        tokens: the transport between the CPUs; this one closes it.
        link: between the GPUs.
    """

    name = "nccl"
    adds: frozenset[torch.dtype] = frozenset()  # payloads on GPUs go over the link

    def __init__(self, tokens: Transport, link: NcclLink) -> None:
        self._tokens, self.link = tokens, link
        self.rank, self.size, self.questions = tokens.rank, tokens.size, tokens.questions
        self.aside, self.for_decoding = tokens.aside, tokens.for_decoding
        self.send, self.receive = tokens.send, tokens.receive
        self.notes, self.on_abort, self.say, self.said = tokens.notes, tokens.on_abort, tokens.say, tokens.said

    def add_up(self, data: Tensor, deadline: Deadline) -> Pending:
        raise NotImplementedError("`adds` says that nothing is added up here")

    def abort(self, note: dict[str, Any]) -> None:
        self.link.abort()  # first: the GPU may be waiting for a peer that waits for this rank
        self._tokens.abort(note)

    def close(self) -> None:
        self.link.abort()
        self._tokens.close()


def connect(
    library: Any, identity: tuple[int, ...], where: Device, tokens: Transport, seconds: float, **rest: Any
) -> NcclLink:
    """Join the communicator; every rank has to be about to.

    A communicator that is not returned is aborted, however late it comes: CuPy destroys one that is dropped as it
    is, and that may wait for peers forever.

    Args:
        identity: rank 0's ``get_unique_id()``.

    Raises:
        ExchangeError: not every rank joined in time, or NCCL refused.
    """
    deadline, given_up = Deadline(seconds), threading.Event()
    made: list[NcclLink] = []
    ended: list[Exception | None] = []

    def join() -> None:
        problem = None
        try:
            with where.moving():
                communicator = library.NcclCommunicator(tokens.size, identity, tokens.rank)
                made.append(NcclLink(library, communicator, where, tokens.rank, tokens.size, **rest))
                if not given_up.is_set():
                    made[0].meet(deadline)
        except Exception as error:  # noqa: BLE001  whatever it is, the other ranks must hear of it
            problem = error
            _abort(made)
        ended.append(problem)
        if given_up.is_set():
            _abort(made)

    thread = threading.Thread(target=join, name="hvc-nccl", daemon=True)  # the call has no bound of its own
    thread.start()
    try:
        thread.join(seconds)
    finally:
        if not ended:
            given_up.set()  # before the abort: a link that is made from now on is aborted by its thread
            _abort(made)
    if given_up.is_set():
        raise ExchangeError(
            f"rank {tokens.rank}: not all of {tokens.size} ranks joined NCCL's communicator within {seconds:g} s; "
            f'NCCL_DEBUG=INFO shows why; or use transport="gloo"'
        )
    if ended[0]:
        raise ExchangeError(f'rank {tokens.rank}: NCCL: {ended[0]}; NCCL_DEBUG=INFO shows why; or use transport="gloo"')
    return made[0]


def _abort(links: Iterable[NcclLink]) -> None:
    for link in links:
        link.abort()
