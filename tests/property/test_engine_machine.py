"""Any order of steps, saves, loads, freezes, other buckets and bad values leaves ranks equal and loses nothing."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from horovod_compress.engine.reducer import Reducer
from horovod_compress.engine.saved import checkpoint, checksums
from horovod_compress.errors import CorruptFrameError, MismatchError, StateError
from horovod_compress.schedule.by_name import make_plan
from tests.battery.kept import Kept, kept, same
from tests.support.local import Fleet, all_same, random_grads, spec

WORLD = 2
#: Fewer elements than a word, and one more; none at all; a matrix.
TENSORS = [spec("one", 1), spec("33", 33), spec("none", 0), spec("matrix", 9, 31)]
NAMES = [tensor.name for tensor in TENSORS]
METHODS: dict[str, dict[str, Any]] = {
    "topk": {"density": 0.1},
    "ef_signsgd": {},
    "marsit": {"compensation": "global", "full_precision_every": 4},
    "dgc": {"density": 0.1},
    "none": {},
}
CONSERVING = ("topk", "none", "ef_signsgd")


class Engine(RuleBasedStateMachine):
    """The reducers of all ranks, and what they should hold."""

    fleet: Fleet | None = None

    @initialize(method=st.sampled_from(sorted(METHODS)), schedule=st.sampled_from(["single", "layerwise"]))
    def begin(self, method: str, schedule: str) -> None:
        self.method, self.seed, self.frozen = method, 0, set[str]()
        self.fleet = Fleet(WORLD, TENSORS, method, schedule=schedule, verify_every=1, **METHODS[method])
        self.saved: tuple[list[dict[str, Any]], Kept, int, list[Any]] | None = None

    def teardown(self) -> None:
        if self.fleet:
            self.fleet.__exit__(None, None, None)

    def _grads(self) -> list[dict[str, torch.Tensor]]:
        self.seed += 1
        return random_grads(WORLD, TENSORS, seed=self.seed)

    def _names(self) -> list[str]:
        assert self.fleet
        return self.fleet.reducers[0].plan.names()

    def _step(self, grads: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        fleet = self.fleet
        assert fleet
        fleet._index = {name: index for index, name in enumerate(self._names())}
        for reducer in fleet.reducers:
            reducer.freeze(fleet._index[name] for name in self.frozen)
        return fleet.step(grads)

    def _residual(self, name: str) -> torch.Tensor:
        assert self.fleet
        found = [mine.get(name, torch.zeros(0)).double() for mine in self.fleet.residuals()]
        return torch.stack(found).mean(dim=0)

    def _check_less_is_left(self, grads: list[Any], waited: list[Any], left: list[Any]) -> None:
        """What a rank sends is the largest part of what it has now, and not of a step before."""
        for mine, had, has in zip(grads, waited, left, strict=True):
            for name in set(NAMES) - self.frozen:
                x = mine[name].double().flatten() + had[name].double()
                assert float(has[name].double().norm()) <= float(x.norm()) * (1 + 1e-6), name

    @rule()
    def step(self) -> None:
        fleet = self.fleet
        assert fleet
        grads, before, waited = self._grads(), {name: self._residual(name) for name in NAMES}, fleet.residuals()
        results = self._step(grads)
        if self.method == "topk":
            self._check_less_is_left(grads, waited, fleet.residuals())
        assert all_same(results)
        for name in NAMES:
            result = results[0][name].double().flatten()
            if name in self.frozen:
                assert not result.any() and torch.equal(self._residual(name), before[name])
            elif self.method in CONSERVING:
                mean = torch.stack([mine[name].double().flatten() for mine in grads]).mean(dim=0)
                left = self._residual(name) if before[name].numel() == mean.numel() else torch.zeros_like(mean)
                had = before[name] if before[name].numel() == mean.numel() else torch.zeros_like(mean)
                torch.testing.assert_close(result + left, mean + had, rtol=1e-4, atol=1e-5)

    @rule(rank=st.integers(0, WORLD - 1), name=st.sampled_from(["one", "33", "matrix"]))
    def step_with_a_nan(self, rank: int, name: str) -> None:
        """It reaches every rank, and what is kept for its bucket stays as it was."""
        grads = self._grads()
        grads[rank][name].view(-1)[0] = float("nan")
        results = self._step(grads)
        assert all(bool(mine[name].isnan().all()) != (name in self.frozen) for mine in results)

    @rule(names=st.sets(st.sampled_from(NAMES)))
    def freeze(self, names: set[str]) -> None:
        self.frozen = names

    @rule()
    def save(self) -> None:
        fleet = self.fleet
        assert fleet
        states = [checkpoint.save(reducer, fleet.methods) for reducer in fleet.reducers]
        self.saved = states, kept(fleet), fleet.reducers[0].step, [reducer.plan for reducer in fleet.reducers]

    @precondition(lambda self: getattr(self, "saved", None))
    @rule()
    def load(self) -> None:
        fleet = self.fleet
        assert fleet and self.saved
        states, then, step, plans = self.saved
        for reducer, plan, state in zip(fleet.reducers, plans, states, strict=True):
            reducer.replan(plan)
            checkpoint.load(reducer, fleet.methods, state, "restore")
        assert same(kept(fleet), then) and {reducer.step for reducer in fleet.reducers} == {step}

    @precondition(lambda self: getattr(self, "saved", None))
    @rule(at=st.integers(0, 1 << 20), bit=st.integers(0, 7), rank=st.integers(0, WORLD - 1))
    def load_what_is_corrupt(self, at: int, bit: int, rank: int) -> None:
        fleet = self.fleet
        assert fleet and self.saved
        state = copy.deepcopy(self.saved[0][rank])
        tensors = [tensor for _, tensor in checksums.tensors(state) if tensor.numel()]
        if tensors:
            raw = tensors[at % len(tensors)].view(-1).view(torch.uint8)
            raw[at % raw.numel()] ^= 1 << bit
        else:
            state["step"] ^= 1 << bit
        before = kept(fleet)
        with pytest.raises((CorruptFrameError, StateError)):
            checkpoint.load(fleet.reducers[rank], fleet.methods, state, "restore")
        assert same(before, kept(fleet))

    @rule(schedule=st.sampled_from(["single", "layerwise", "size:200B"]))
    def other_buckets(self, schedule: str) -> None:
        fleet = self.fleet
        assert fleet
        plan = make_plan(schedule, fleet.tensors, 0, fleet.methods.number)
        before = [reducer.kept.states() for reducer in fleet.reducers]
        copies = [{k: {n: t.clone() for n, t in those.items()} for k, those in mine.items()} for mine in before]
        for reducer, mine in zip(fleet.reducers, copies, strict=True):
            reducer.replan(plan)
            now = reducer.kept.states()
            assert all(torch.equal(now[kind][name], t) for kind, those in mine.items() for name, t in those.items())

    @rule(rank=st.integers(0, WORLD - 1))
    def one_rank_alone_freezes(self, rank: int) -> None:
        """The end of this job: all are told, and it starts again from nothing."""
        fleet = self.fleet
        assert fleet
        self._step(self._grads())  # so that all ranks have compared what is frozen
        names = self._names()
        other = {names.index(name) for name in {"33"} ^ self.frozen}
        fleet.reducers[rank].freeze(other)
        step = fleet.offer(self._grads())

        def told(reducer: Reducer) -> bool:
            with pytest.raises(MismatchError):
                # All of them: a bucket that is frozen here is not exchanged, and needs no other rank.
                for index in range(len(names)):
                    reducer.result(index, step)
            return True

        # All at once, as in a job: a rank learns from the others while it waits for its own results.
        with ThreadPoolExecutor(WORLD) as pool:
            assert all(pool.map(told, fleet.reducers))
        self.teardown()
        self.begin(self.method, "single")

    @invariant()
    def ranks_are_at_the_same_step(self) -> None:
        if self.fleet:
            assert all(reducer.wait_idle(10.0) for reducer in self.fleet.reducers)
            assert len({reducer.step for reducer in self.fleet.reducers}) == 1
            assert not any(bool(t.isnan().any()) for mine in kept(self.fleet) for t in mine.values())


#: `make test` tries a few orders, `make test-all` many.
TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=3, stateful_step_count=10, deadline=None, derandomize=True, database=None)


@pytest.mark.slow
class TestEngineLong(Engine.TestCase):
    settings = settings(max_examples=60, stateful_step_count=20, deadline=None, derandomize=True, database=None)
