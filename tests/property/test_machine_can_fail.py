"""The turns of the machine that drives the engine find faults of each kind, planted one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from horovod_compress import ops
from horovod_compress.engine.reducer import Reducer
from horovod_compress.engine.saved import checkpoint, checksums
from horovod_compress.errors import HorovodCompressError
from tests.property.test_engine_machine import METHODS, Engine
from tests.support.marks import slow

Plant = Callable[[pytest.MonkeyPatch], None]


def _around(patch: pytest.MonkeyPatch, where: Any, name: str, wrap: Callable[..., Any]) -> None:
    """Let a function be called by another one, which gets it first."""
    whole = getattr(where, name)
    patch.setattr(where, name, lambda *given, **named: wrap(whole, *given, **named))


def residual_is_not_updated(patch: pytest.MonkeyPatch) -> None:
    def decode(whole: Any, *given: Any, **named: Any) -> Any:
        residuals = given[4]
        before = [residual.clone() for residual in residuals]
        found = whole(*given, **named)
        for residual, mine in zip(residuals, before, strict=True):
            residual.copy_(mine)
        return found

    _around(patch, ops, "values_decode_all", decode)


def payload_is_stale(patch: pytest.MonkeyPatch) -> None:
    written: dict[tuple[int, int], Any] = {}

    def encode(whole: Any, *given: Any, **named: Any) -> None:
        ends, out = given[-2:]
        place = out.data_ptr(), len(ends)
        if place not in written:
            whole(*given, **named)
            written[place] = ends.clone(), out  # kept, so that no other payload lies there
        ends.copy_(written[place][0])

    _around(patch, ops, "values_encode_all", encode)


def one_rank_decodes_differently(patch: pytest.MonkeyPatch) -> None:
    def decode(whole: Any, sections: Any, own: int, *given: Any, **named: Any) -> Any:
        found = whole(sections, own, *given, **named)
        for grad in given[1] if own == 1 else ():
            grad.mul_(1 + 1e-6)
        return found

    _around(patch, ops, "values_decode_all", decode)


def state_is_not_restored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint, "restore", lambda reducer, state, residuals: reducer.resume(state["step"]))


def step_is_not_restored(patch: pytest.MonkeyPatch) -> None:
    def resume(whole: Any, reducer: Reducer, step: int) -> None:
        whole(reducer, step + (reducer.rank == 1))

    _around(patch, Reducer, "resume", resume)


def corrupt_states_are_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checksums, "check", lambda state: None)


def other_buckets_lose_what_waits(patch: pytest.MonkeyPatch) -> None:
    def replan(whole: Any, reducer: Reducer, plan: Any) -> None:
        whole(reducer, plan)
        for residual in reducer.kept.residuals().values():
            residual.zero_()

    _around(patch, Reducer, "replan", replan)


def frozen_tensors_are_exchanged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reducer, "freeze", lambda reducer, indices: None)


PLANTED: list[Plant] = [
    residual_is_not_updated,
    payload_is_stale,
    one_rank_decodes_differently,
    state_is_not_restored,
    step_is_not_restored,
    corrupt_states_are_taken,
    other_buckets_lose_what_waits,
    frozen_tensors_are_exchanged,
]


def walk(method: str) -> None:
    """Take every turn of the machine, in one order: a search may miss a fault, and what it tries is chance."""
    machine = Engine()
    turns: list[Callable[[], Any]] = [
        lambda: machine.begin(method, "single"),
        machine.step,
        machine.step,
        lambda: machine.step_with_a_nan(1, "33"),
        lambda: machine.other_buckets("layerwise"),
        machine.step,
        lambda: machine.freeze({"matrix"}),
        machine.step,
        machine.save,
        machine.step,
        machine.load,
        lambda: machine.load_what_is_corrupt(1, 3, 0),
        machine.step,
        lambda: machine.one_rank_alone_freezes(0),
    ]
    try:
        for turn in turns:
            turn()
            machine.ranks_are_at_the_same_step()
    finally:
        machine.teardown()


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception, HorovodCompressError)):
        for method in METHODS:
            walk(method)


@pytest.mark.parametrize("method", [*list(METHODS)[:2], *slow(*list(METHODS)[2:])])
def test_control(method: str) -> None:
    walk(method)
