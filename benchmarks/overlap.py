"""What the step-time benchmark says about measured steps: how much of an exchange hides behind compute.

T1 is the step that exchanges nothing (`headroom`), measured beside the others on the same ranks; TN
is a contestant's step. The exposed exchange is TN - T1; the exchange alone is the same difference
in steps without compute, when there is nothing to hide behind.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.bandwidth import NOTHING, label, wire_seconds
from benchmarks.results import Record

AMORTISED_OVER = (50, 100)  # rounds from one in full precision to the next
_SIGNS_ONLY = "full_precision_every=0"


def enriched(records: Sequence[Record], place: Record) -> list[Record]:
    """Return the job's records with what follows from them, each against the `headroom` of its group.

    Args:
        place: what the launcher says of itself.
    """
    idle = {record["group"]: record for record in records if record["name"] == NOTHING}
    # Of a job that was ended in the middle, a group may have come in part.
    return [_against(record, idle[record["group"]], place) for record in records if record["group"] in idle]


def _against(record: Record, nothing: Record, place: Record) -> Record:
    step, t1 = record["median_seconds"], nothing["median_seconds"]
    alone = record["median_alone_seconds"] - nothing["median_alone_seconds"]
    # With several ranks on a host a rank's bytes are not what its host's link carries.
    rate_bits = place.get("rate_bits") if place.get("hosts") == record["ranks"] else None
    idle = record["name"] == NOTHING
    return record | {
        "place": place,
        "t1_seconds": t1,
        "scaling": t1 / step,
        "exposed_seconds": step - t1,
        "exchange_alone_seconds": None if idle else alone,
        "hidden_share": None if idle else hidden_share(step - t1, alone),
        "wire_seconds": wire_seconds(record["bytes_sent"], rate_bits),
    }


def hidden_share(exposed: float, alone: float) -> float | None:
    """Return which part of the exchange the compute hides; below 0 where the two disturb each other."""
    return 1 - exposed / alone if alone > 0 else None


def first_groups(records: Sequence[Record]) -> list[Record]:
    """Return the records with one `headroom`, that of the first group."""
    return [r for r in records if r["name"] != NOTHING or r["group"] == 0]


# ---- with full-precision rounds ---------------------------------------------------------------


def amortised(records: Sequence[Record]) -> list[Record]:
    """Return what Marsit's steps take on average when every K-th round is in full precision.

    It is computed, ((1 * none + (K-1) * marsit) / K), from steps of both that were measured.

    Args:
        records: as :func:`enriched` returns them.
    """
    found = []
    for record in records:
        if _front(record["name"])[1].startswith("marsit") and (full := partner(record["name"], records)):
            found += [_mean(record, full, every) for every in AMORTISED_OVER]
    return found


def partner(name: str, records: Sequence[Record]) -> Record | None:
    """Return the uncompressed contestant with the same options as a Marsit of sign rounds only, or plain `none`."""
    words = name.split()[1:]
    if _SIGNS_ONLY not in words:
        return None
    words.remove(_SIGNS_ONLY)
    plain = _front(name)[0] + "none"
    by_words = {frozenset(r["name"].split()[1:]): r for r in records if r["name"].split()[0] == plain}
    return by_words.get(frozenset(words)) or by_words.get(frozenset())


def _front(name: str) -> tuple[str, str]:
    """Return what a name says of the front, "ddp:", "plain:" or nothing, and the method with its options."""
    front, colon, method = name.partition(":")
    return (front + colon, method) if colon and " " not in front else ("", name)


def _mean(signs: Record, full: Record, every: int) -> Record:
    step = (full["median_seconds"] + (every - 1) * signs["median_seconds"]) / every
    t1 = (full["t1_seconds"] + (every - 1) * signs["t1_seconds"]) / every
    return {
        "bench": "step",
        "name": f"{label(signs['name'])} K={every}",
        "computed_from": [signs["name"], full["name"]],
        "full_precision_every": every,
        "model": signs["model"],
        "ranks": signs["ranks"],
        "place": signs["place"],
        "computed_seconds": step,
        "t1_seconds": t1,
        "scaling": t1 / step,
        "exposed_seconds": step - t1,
        "bytes_sent": round((full["bytes_sent"] + (every - 1) * signs["bytes_sent"]) / every),
    }
