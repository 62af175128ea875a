"""What the all-reduce benchmark says about a measured time: bandwidths, the limit of the wire, whether it pays.

S is the size of the uncompressed tensor in bytes, M the number of ranks, t the time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.results import Record, milliseconds

BASELINE = "horovod fp32"
NOTHING = "headroom"
WORTH_IT = 1.1  # times faster; less than that is lost in the spread
FEW_BURSTS = 10  # what a limited link lets pass at no cost after a pause is noticed in fewer
_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "elem": 4, "kelem": 4 * 10**3, "Melem": 4 * 10**6}


def size_in_bytes(text: str) -> int:
    """Return the bytes of ``1kB``, ``100MB``, ``25Melem`` (elements of four bytes) or a number of bytes.

    Raises:
        ValueError: the text is not such a size, or no whole number of float32.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if not found or found[2] not in _UNITS:
        units = ", ".join(filter(None, _UNITS))
        raise ValueError(f"a size is a number and one of {units}, such as 100MB or 25Melem; got {text!r}")
    count = float(found[1]) * _UNITS[found[2]]
    if count < 4 or count % 4:
        raise ValueError(f"a size is a whole number of float32, 4 bytes each; {text!r} is {count:g} bytes")
    return int(count)


# ---- bandwidth --------------------------------------------------------------------------------


def ring_factor(ranks: int) -> float:
    """Return what each rank of a ring all-reduce sends, as a multiple of the payload."""
    return 2 * (ranks - 1) / ranks


def algorithm_bandwidth(size: float, seconds: float) -> float:
    """Return S/t in bytes per second; "effective" when the method sends less than S."""
    return size / seconds


def bus_bandwidth(size: float, seconds: float, ranks: int) -> float:
    """Return S/t * 2(M-1)/M, which can be compared with a link's rate whatever M is, as nccl-tests defines it."""
    return algorithm_bandwidth(size, seconds) * ring_factor(ranks)


def wire_seconds(sent: float | None, rate_bits: float | None) -> float | None:
    """Return how long a link of so many bits per second needs for the bytes that one rank sends."""
    return 8 * sent / rate_bits if sent is not None and rate_bits else None


def enriched(record: Record, place: Record) -> Record:
    """Return a record of the job with what follows from it and from where it ran.

    Args:
        place: what the launcher says of itself.
    """
    seconds, exchange = record["median_seconds"], record["median_exchange_seconds"]
    # With several ranks on a host a rank's bytes are not what its host's link carries.
    rate_bits = place.get("rate_bits") if place.get("hosts") == record["ranks"] else None
    wire, few = wire_seconds(record["bytes_sent"], rate_bits), within_bursts(record, place)
    exchanged = exchange if exchange is not None else seconds
    moved = record["check"] != "none"
    return record | {
        "place": place,
        "algorithm_bandwidth": algorithm_bandwidth(record["bytes"], seconds) if moved else None,
        "bus_bandwidth": bus_bandwidth(record["bytes"], seconds, record["ranks"]) if moved else None,
        "effective": is_compressed(record),
        "wire_seconds": wire,
        "within_bursts": few,
        "fraction_of_wire": wire / exchanged if wire and not few else None,
        "fraction_of": "exchange" if exchange is not None else "whole",
    }


def within_bursts(record: Record, place: Record) -> bool:
    """Return whether a rank sends so little that the bursts of an emulated link make it look too fast."""
    burst = place.get("burst_bytes") if place.get("rate_bits") else None
    return bool(burst and record["bytes_sent"] and record["bytes_sent"] < FEW_BURSTS * burst)


def is_compressed(record: Record) -> bool:
    return record["check"] not in ("float32", "none")


# ---- what to expect ---------------------------------------------------------------------------


#: Begins the name of a method of this package that runs under DistributedDataParallel, as its communication hook.
UNDER_DDP = "ddp:"
#: Begins the name of one that takes the gradients of a module without a wrapper, in the process group that DDP has.
UNWRAPPED = "plain:"


def without_front(name: str) -> str:
    """Return the name of a contestant without what it says of the front."""
    return name.removeprefix(UNDER_DDP).removeprefix(UNWRAPPED)


class Expectation(NamedTuple):
    """How a method is likely to behave, for deciding what not to start."""

    payload: float  # share of S that is sent
    seconds_per_byte: float  # of one rank with a core of its own, without the wire
    turns_to_warm_up: int = 2
    dense_turns: int = 0  # turns of the warm-up that send everything


def expectation(method: str) -> Expectation:
    """Return what is likely of a contestant; of an unknown one, as much as of an uncompressed one."""
    method = without_front(method)
    if method == NOTHING:
        return Expectation(0.0, 0.0)
    if method == "horovod fp16":
        return Expectation(0.5, 8e-9)  # its sums in float16 are slow on processors
    if "powersgd" in method:
        return Expectation(0.001, 2e-9, turns_to_warm_up=5, dense_turns=2)
    if "fp16" in method or method.startswith("bf16"):
        return Expectation(0.5, 1.5e-9)
    if method.startswith("marsit"):
        return Expectation(1 / 32, 0.6e-9)
    if method.startswith("global_qsgd"):
        return Expectation(1 / 4, 1e-9)
    return Expectation(1.0, 1.5e-9)


def predicted_seconds(
    methods: Sequence[str], size: int, ranks: int, rate_bits: float | None, repeat: int, cores_per_rank: float = 1.0
) -> float:
    """Return roughly how long all turns of a cell will take."""
    total = 0.0
    for method in methods:
        likely = expectation(method)
        turns = repeat + likely.turns_to_warm_up
        dense = likely.dense_turns + likely.payload * (turns - likely.dense_turns)
        wire = wire_seconds(dense * ring_factor(ranks) * size, rate_bits) or 0.0
        total += wire + turns * (0.01 + size * likely.seconds_per_byte / min(1.0, cores_per_rank))
    return total


def predicted_memory(methods: Sequence[str], size: int, ranks: int) -> int:
    """Return roughly how many bytes all ranks of a cell need together, measured with 2 ranks and 11 contestants."""
    return ranks * (300_000_000 + round(size * (2 + 1.2 * len(methods))))


# ---- whether it pays --------------------------------------------------------------------------


def speed_up(record: Record, cell: Sequence[Record]) -> float | None:
    """Return how many times faster than Horovod's float32 a method is; None without that in the cell."""
    base = _named(cell, BASELINE)
    return base["median_seconds"] / record["median_seconds"] if base else None


def verdict(cell: Sequence[Record]) -> str:
    """Return a sentence on whether compression pays for this size, rate and number of ranks.

    The best compressed contestant is compared with the fastest that does not compress, so that
    nobody is credited with what the transport does. Wrong results do not count.
    """
    right = [record for record in cell if not record["wrong"]]
    compressed = [record for record in right if is_compressed(record)]
    plain = [record for record in right if record["check"] == "float32"]
    if not plain or not compressed:
        return ""
    best, base = _fastest(compressed), _fastest(plain)
    if base["median_seconds"] < WORTH_IT * best["median_seconds"]:
        return f"At this rate and size compression does not pay: {_why_not(best, base, right)}."
    times = f"{_times(base, best)} times as fast as {label(base['name'])}"
    found = f"Compression pays here: {label(best['name'])} is {times}"
    stock = _named(right, BASELINE)
    if stock is None or stock is base:
        return f"{found}."
    return f"{found}, the fastest without compression ({_times(stock, best)} times as fast as {BASELINE})."


def _why_not(best: Record, base: Record, right: Sequence[Record]) -> str:
    """Return in words why compression does not pay: too little to save, or no method that is fast enough."""
    nothing, whole = _named(right, NOTHING), base["median_seconds"]
    could_save = whole - nothing["median_seconds"] if nothing else whole
    added = [r["median_seconds"] - r["median_exchange_seconds"] for r in right if _tells_exchange(r)]
    if added and could_save <= min(added):
        return (
            f"{label(base['name'])} has at most {milliseconds(could_save)} ms to save, and the compressed methods "
            f"that report their exchange add at least {milliseconds(min(added))} ms to it"
        )
    return (
        f"the fastest compressed method, {label(best['name'])}, takes {milliseconds(best['median_seconds'])} ms, "
        f"the fastest without compression, {label(base['name'])}, {milliseconds(whole)} ms"
    )


def _tells_exchange(record: Record) -> bool:
    return is_compressed(record) and record["median_exchange_seconds"] is not None


def _fastest(records: Sequence[Record]) -> Record:
    return min(records, key=lambda record: record["median_seconds"])


def _times(slow: Record, fast: Record) -> str:
    """Return how many times as fast one is as another, with two digits at least."""
    value = slow["median_seconds"] / fast["median_seconds"]
    return f"{value:.2g}" if value < 99.5 else f"{value:.0f}"


def _named(cell: Sequence[Record], name: str) -> Record | None:
    return next((record for record in cell if record["name"] == name), None)


def label(name: str) -> str:
    """Return a contestant's name for tables and plots; what their notes say is left out."""
    words = [word.removeprefix("exchange=").removeprefix("dithering=") for word in name.split()]
    return " ".join(word for word in words if word != "full_precision_every=0")
