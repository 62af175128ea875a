"""The handshake: every rank shows its document at the start, and differences are refused.

Mismatched options with equal shapes are invisible to Horovod and would give wrong results in
silence. The ranks therefore gather one document each, before the first step, and compare them
field by field. Their documents also say which ranks share a host.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import __version__
from ...codecs.base import variants_of
from ...errors import ConfigError, HorovodCompressError, MismatchError, one_line, without_addresses
from ...exchange.wire import WIRE_VERSION
from ...options import Options
from ...schedule.plan import TensorSpec
from ..methods import Methods
from .differences import by_value


@dataclass(frozen=True)
class Document:
    """What one rank shows.

    Attributes:
        fields: what must be equal on every rank.
        refusal: why this rank cannot go on, if it cannot; it takes part all the same, so that
            the others need not wait for it.
        plan: rank 0's plan, which every rank uses.
        name: what rank 0 calls this compression, and no other one: one more may have the same plan.
        run: what rank 0 calls the run of the framework: its compressions in one run have it alike.
        gpu: names the GPU that this rank's gradients are on, if they all are and NCCL can be used here.
        host: names the host that this rank is on; see :class:`Place`.
        unreachable: why ranks on other hosts cannot connect to this one.
        machine: names the host for ``exchange="hierarchical"``; see :class:`Place`.
    """

    fields: dict[str, Any]
    refusal: str | None = None
    plan: list[dict[str, Any]] | None = None
    name: str = ""
    run: str = ""
    gpu: str | None = None
    host: str = ""
    unreachable: str | None = None
    machine: str = ""


def fields(
    methods: Methods, options: Options, tensors: Sequence[TensorSpec], transport: str, world: int
) -> dict[str, Any]:
    """Return the fields of a rank's document that must be equal on every rank."""
    shown: dict[str, Any] = {
        "package version": __version__,
        "wire version": WIRE_VERSION,
        "byte order": sys.byteorder,
        "world": world,
        "method": methods.name,
    }
    for codec in methods.codecs:
        shown |= {f"{kind.name} payload version": kind.wire_version for kind in variants_of(codec)}
    shown |= options.document() | {"transport": transport}
    shown |= methods.config()
    shown["number of parameters"] = len(tensors)
    for index, tensor in enumerate(tensors):
        kind = tensor.device.partition(":")[0]  # ranks number their GPUs in their own ways
        on = "" if kind == "cpu" else f" on {kind}"
        shown[f"parameter {index}"] = f"{tensor.name} {list(tensor.shape)} {tensor.dtype}{on}"
    return shown


def check(documents: Sequence[Document]) -> None:
    """Compare the documents of all ranks; every rank comes to the same end.

    Raises:
        ConfigError: some rank cannot go on.
        MismatchError: names the first field that differs, and each rank's value.
    """
    refusals = [document.refusal for document in documents]
    if any(refusals):
        rank, why = next((rank, why) for rank, why in enumerate(refusals) if why)
        alike = all(other == why for other in refusals)  # a mistake that all made alike needs no rank's name
        raise ConfigError(why if alike else f"rank {rank} cannot start: {one_line(why)}")
    names = dict.fromkeys(name for document in documents for name in document.fields)
    for name in names:
        values = [document.fields.get(name, "(not there)") for document in documents]
        if any(value != values[0] for value in values):
            raise MismatchError(
                f"the ranks do not agree on {name}: {by_value(values)}; start every rank with the "
                f"same options, model and version of horovod-compress",
                about=name,
            )


def from_plain(given: dict[str, Any]) -> Document:
    """Rebuild a document from plain data, as :func:`dataclasses.asdict` gives it.

    Raises:
        MismatchError: it is none.
    """
    try:
        return Document(**given)
    except TypeError:
        raise MismatchError(
            f"a rank sent {str(given)[:100]} instead of its options; install the same version of horovod-compress on "
            "every rank"
        ) from None


def refusal(error: Exception) -> Document:
    """Return the document of a rank that cannot go on."""
    ours = isinstance(error, HorovodCompressError)
    text = str(error) if ours else f"{type(error).__name__}: {error}"
    return Document({}, refusal=without_addresses(text))  # then one mistake has the same words on all ranks


# ---- where the ranks are -------------------------------------------------------------------------

LOOPBACK = "127.0.0.1"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@dataclass(frozen=True)
class Place:
    """Where one rank is: on one host the ranks connect over loopback, else at the addresses of their hosts.

    Nothing in the environment says this for certain, so every rank shows the name of its host in its document.

    Attributes:
        address: at which other hosts reach it, None if at none.
        host: what no other host is called; empty where the address holds wherever the other ranks are.
        problem: why there is no address.
        machine: what the framework, or else the host itself, calls the host; ranks of one machine share memory.
    """

    address: str | None
    host: str = ""
    problem: str | None = None
    machine: str = field(default_factory=lambda: machine_name())  # noqa: PLW0108  it is defined below


def machine_name() -> str:
    """Return a name that the ranks share that a launcher has started together on one host."""
    launched = [os.environ.get(name, "") for name in ("HOROVOD_HOSTNAME", "GROUP_RANK")]
    return " ".join([*launched, host_name()])


def host_name() -> str:
    """Return a name that ranks share if they reach each other over loopback.

    The host's own name is not enough: clones of one image may share it, and so do network namespaces of one host.
    """
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(_BOOT.read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(str(_NETWORK.readlink()))
    return " ".join(parts)


def own_address(place: Place, documents: Sequence[Document]) -> str:
    """Return the address at which this rank listens, when all have shown where they are.

    Raises:
        ConfigError: the ranks are on several hosts, and one of them cannot be reached; every rank raises it.
    """
    if place.host and {document.host for document in documents} == {place.host}:
        return LOOPBACK
    for rank, document in enumerate(documents):
        if document.unreachable:
            raise ConfigError(f"rank {rank} is not on the same host as the others: {document.unreachable}")
    assert place.address is not None
    return place.address
