"""What a decoder reads is consensus bytes, or compared across ranks, or without influence on other ranks' results.

Results are equal on every rank by construction only as far as this holds: so each thing that a codec works with has a
place in this file, and each place is tried.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields

import pytest
import torch

from horovod_compress.codecs.base import Codec
from horovod_compress.codecs.work import Work
from horovod_compress.engine.agreement.differences import TABLES
from horovod_compress.engine.reducer import Next, Reducer
from horovod_compress.errors import MismatchError
from tests.battery.cases import EVERY, each_case
from tests.support.local import Fleet, all_same, random_grads, spec
from tests.support.samples import Sample

#: Equal on every rank after the exchange.
CONSENSUS = {"regions", "results", "shared", "gathered", "used"}
#: From rank 0's plan, or made of it and of the options, which are compared at the start. A memo may also hold pieces of
#: what is a rank's own, such as room for positions, to cut them once.
PLANNED = {"bucket", "world", "memo"}
#: A rank's own: it enters what the rank sends, and nothing that it decodes.
OWN = {"grads", "state", "carry", "momenta", "local", "linear", "_pieces"}
#: Shown to the other ranks before each step: see Operands.
COMPARED = {"divisors", "withheld", "tables"}
#: What else ``decode`` is given: the place of what is ready, what random bits depend on, and what results are
#: multiplied by, which is shown too.
GIVEN = {"self", "work", "parts", "key", "result_scale"}

WORLD = 3
TENSORS = [spec("a", 40, 50), spec("b", 701), spec("c", 90, 20)]


def test_everything_that_a_codec_works_with_has_a_place() -> None:
    assert {field.name for field in fields(Work)} == CONSENSUS | PLANNED | OWN | COMPARED
    assert set(inspect.signature(Codec.decode).parameters) == GIVEN


def _compress(fleet: Fleet) -> None:
    """Let the coming step be a compressed one."""
    for reducer in fleet.reducers:
        reducer.buckets.choose(Next("coded"))


def _equal_after(case: Sample, change: Callable[[Reducer], object]) -> bool:
    """Return whether all ranks have the same results in the steps after one of them was changed."""
    with case.fleet(WORLD, TENSORS, verify_every=0) as fleet:
        for number in range(4):
            if number == 2:
                assert fleet.reducers[-1].wait_idle(10.0)
                change(fleet.reducers[-1])
            _compress(fleet)
            results = fleet.step(random_grads(WORLD, TENSORS, seed=number))
            if not all_same(results):
                return False
    return True


def _other_state(reducer: Reducer) -> None:
    generator = torch.Generator().manual_seed(5)
    for kept in reducer.kept.states().values():
        for tensor in kept.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))


def _no_carry(reducer: Reducer) -> None:
    for carry in reducer.kept.carries().values():
        carry.zero_()


@each_case(quick=EVERY)
def test_what_is_a_rank_s_own_changes_all_results_alike(case: Sample) -> None:
    assert _equal_after(case, lambda reducer: (_other_state(reducer), _no_carry(reducer)))


@each_case(lambda codec: codec.properties().divides == "before", quick=EVERY)
def test_divisors_have_to_be_compared(case: Sample) -> None:
    """The control: a rank that divides by something else has other results."""
    divisors = {tensor.name: torch.full((tensor.count,), 2.0) for tensor in TENSORS}
    assert not _equal_after(case, lambda reducer: reducer.buckets.divide_by(divisors))


def _shares_tables(codec: Codec) -> bool:
    """Errors that LoCo keeps are a rank's own."""
    with Fleet(2, TENSORS, codec) as fleet:
        reducer = fleet.reducers[0]
        return bool(reducer.kept.tables()) and not any(state.rounds.tables.own for state in reducer.buckets)


@each_case(_shares_tables, quick=EVERY)
def test_tables_are_compared(case: Sample) -> None:
    def change(reducer: Reducer) -> None:
        for table in reducer.kept.tables().values():
            table.add_(1)

    if case.options.get("error_feedback") == "sketch":  # the control: the others' tables enter what a rank sends only
        assert not _equal_after(case, change)
    with case.fleet(2, TENSORS) as fleet:
        _compress(fleet)
        fleet.step(random_grads(2, TENSORS))
        for rank, reducer in enumerate(fleet.reducers):
            assert reducer.wait_idle(10.0)
            if rank:
                change(reducer)
            reducer.resume(reducer.step)  # as after a load
            reducer.kept.show_tables()
        _compress(fleet)
        with pytest.raises(MismatchError, match=f"{TABLES} differs between ranks: rank 0 = '[0-9a-f]+', rank 1 = "):
            fleet.step(random_grads(2, TENSORS, seed=1))
