"""The predictions of one world: a method with every schedule, and no compression beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..codecs import registry
from ..codecs.base import Codec
from ..codecs.by_step import config_of, described
from ..errors import ConfigError
from .network import Link
from .prediction import USUAL, Predictor, Timeline, World
from .shapes import Table
from .traffic import rounds

#: The method that sends float32 as it is.
PLAIN = "none"


@dataclass(frozen=True)
class Case:
    """What is planned for.

    Attributes:
        compute: seconds of a step without any exchange, which is T1.
    """

    table: Table
    compute: float
    world: World


@dataclass(frozen=True)
class Found:
    """A method in a world.

    Attributes:
        timelines: by schedule, the best one first.
        share: of usual rounds among all.
    """

    codec: Codec
    timelines: tuple[Timeline, ...]
    share: float

    @property
    def best(self) -> Timeline:
        return self.timelines[0]


def predicted(case: Case, codec: Codec, schedules: Sequence[str] = USUAL) -> Found:
    """Return what a method takes with the best buckets, and with those of some schedules.

    Raises:
        ConfigError: the method cannot serve this world or this model.
    """
    predictor = Predictor(case.table, codec, case.world, case.compute)
    timelines = (predictor.best(), *(predictor.usual(name) for name in schedules))
    return Found(codec, timelines, rounds(codec)[0][1])


def plain(case: Case) -> Found:
    """Return the same without compression: float32 through this package's own exchange."""
    return predicted(case, registry.create(PLAIN), ("size:25MB",))


# ---- other worlds -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One method with one number of ranks: a prediction, or why there is none."""

    method: str
    ranks: int
    timeline: Timeline | None
    problem: str = ""
    available: bool = True  # False: what if the package had a hierarchical exchange
    lossless: bool = False  # unbiased, or what is not sent now is sent later


def cells(case: Case, codecs: Sequence[Codec], ranks: Sequence[int], hosts: tuple[int, Link] | None) -> list[Cell]:
    """Return the predictions of some methods for some numbers of ranks, with the best buckets of each.

    Args:
        hosts: ranks on a host and the connection between them: adds what a hierarchical exchange would take.
    """
    found = []
    for codec in codecs:
        for number in ranks:
            one = replace(case, world=replace(case.world, ranks=number))
            found.append(_cell(one, codec))
            if hosts and found[-1].timeline and (what_if := _hierarchical(one, codec, hosts)):
                found.append(what_if)
    return found


def _cell(case: Case, codec: Codec) -> Cell:
    law = codec.properties().law
    lossless = law.unbiased or law.conserves
    try:
        found = Predictor(case.table, codec, case.world, case.compute).best()
    except ConfigError as error:
        return Cell(name_of(codec), case.world.ranks, None, str(error))
    return Cell(name_of(codec), case.world.ranks, found, lossless=lossless)


def _hierarchical(case: Case, codec: Codec, hosts: tuple[int, Link]) -> Cell | None:
    world = replace(case.world, hosts=hosts)
    if not world.is_hierarchical(codec):
        return None
    cell = _cell(replace(case, world=world), codec)
    return replace(cell, method=f"{cell.method}, hierarchical", available=False)


def name_of(codec: Codec) -> str:
    """Return a method with the options that are not its defaults."""
    usual = config_of(type(codec)())
    options = {name: value for name, value in config_of(codec).items() if value != usual.get(name)}
    return " ".join([codec.name, *(f"{name}={value}" for name, value in options.items())])


# ---- as plain data ----------------------------------------------------------------------------


def document(case: Case, found: Found, bare: Found, saved: str | None = None) -> dict[str, Any]:
    """Return the predictions of one world as plain data; seconds and bytes."""
    return {
        "bench": "plan",
        **case_document(case),
        "ranks": case.world.ranks,
        "method": described(found.codec),
        "timelines": [timeline_document(case, one, found.codec.name) for one in found.timelines],
        "uncompressed": [timeline_document(case, one, PLAIN) for one in bare.timelines],
        "buckets": buckets_document(found.best),
        "plan": found.best.plan.document(),
        "saved": saved,
    }


def case_document(case: Case) -> dict[str, Any]:
    """Return the model and the job that were predicted for, as in a result file."""
    world = case.world
    return {
        "model": case.table.model,
        "parameters": case.table.count,
        "tensors": len(case.table.tensors),
        "rate_bytes_per_second": world.link.rate,
        "latency_seconds": world.link.latency,
        "cores_per_rank": world.cores,
        "compute_seconds": case.compute,
    }


def timeline_document(case: Case, one: Timeline, method: str) -> dict[str, Any]:
    """Return the prediction for one schedule, as in a result file."""
    return {
        "method": method,
        "schedule": one.schedule,
        "buckets": len(one.slots),
        "step_seconds": one.step,
        "scaling": case.compute / one.step,
        "bytes_sent": round(one.sent),
    }


def buckets_document(one: Timeline) -> list[dict[str, Any]]:
    """Return what happens to each bucket and when, as in a result file."""
    return [
        {
            "tensors": [tensor.name for tensor in slot.bucket.tensors],
            "elements": slot.bucket.count,
            "bytes_sent": round(slot.sent),
            "collective": slot.collective,
            "ready_seconds": slot.ready,
            "begin_seconds": slot.begin,
            "end_seconds": slot.end,
            "decoded_seconds": slot.decoded,
        }
        for slot in one.slots
    ]


def cells_document(case: Case, found: Sequence[Cell]) -> dict[str, Any]:
    """Return the predictions for several worlds as plain data."""
    return {"bench": "plan", **case_document(case), "worlds": [_cell_document(case, cell) for cell in found]}


def _cell_document(case: Case, cell: Cell) -> dict[str, Any]:
    start = {"method": cell.method, "ranks": cell.ranks, "available": cell.available}
    if cell.timeline is None:
        return start | {"problem": cell.problem}
    return start | timeline_document(case, cell.timeline, cell.method) | {"unbiased_or_conserving": cell.lossless}
