"""Local steps with an outer optimizer, overlap, fragments and mixing, against a plain rule in NumPy."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from horovod_compress.codecs import registry
from horovod_compress.codecs.by_step import by_step
from horovod_compress.engine.methods import per_layer
from horovod_compress.engine.optimizer.fragments import fragments_of
from horovod_compress.engine.optimizer.outer import Outer
from horovod_compress.engine.optimizer.updates import UpdateExchange
from horovod_compress.errors import (
    ConfigError,
    ExchangeError,
    MismatchError,
    NonFiniteError,
    StateError,
)
from tests.support.marks import each_value, slow
from tests.support.samples import Sample, samples
from tests.support.states import resealed
from tests.unit.test_update import adamw, train

WORLD, RATE = 3, 0.05
NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
HEAVY = partial(torch.optim.SGD, lr=0.5, momentum=0.8)
LENGTHS = {"used": 40, "unused": 30}
Named = dict[str, nn.Parameter]


def target(rank: int, name: str) -> torch.Tensor:
    """Return what a rank's loss pulls a parameter to: half the square of the distance."""
    generator = torch.Generator().manual_seed(rank + 10 * len(name))
    return torch.randn(LENGTHS[name], generator=generator)


def pull(rank: int, named: Named) -> None:
    for name, parameter in named.items():
        parameter.grad = parameter.detach() - target(rank, name)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def heavy(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


class Oracle:
    """The rule, one number after the other, for all ranks at once."""

    def __init__(self, outer: dict[str, float], nesterov: bool, options: dict[str, Any]) -> None:
        self.outer, self.nesterov, self.options = outer, nesterov, options
        self.own = {n: np.full((WORLD, k), 0.5) for n, k in LENGTHS.items()}
        self.base = {n: np.full(k, 0.5) for n, k in LENGTHS.items()}
        self.momentum = {n: np.zeros(k) for n, k in LENGTHS.items()}
        self.pending: tuple[int, list[str], dict[str, Any], dict[str, Any]] | None = None

    def run(self, steps: int) -> None:
        delay, parts = self.options["communication_delay"], self.options.get("fragments", 1)
        warm, overlap = self.options.get("warmup_exchanges", 0), self.options.get("overlap", 0)
        names, in_cycle = list(LENGTHS), 0
        for step in range(steps):
            for name, own in self.own.items():
                own[:] -= RATE * (own - np.stack([target(rank, name).numpy() for rank in range(WORLD)]))
            in_cycle += 1
            if self.pending and step - self.pending[0] == overlap:
                self.apply()
            if step < warm:
                due, in_cycle = names, 0
            elif parts == 1:
                due = names if in_cycle == delay else []
            else:
                due = [name for p, name in enumerate(names) if in_cycle == (p + 1) * delay // parts]
            in_cycle %= delay
            if due:
                means = {n: (self.own[n] - self.base[n]).mean(0) for n in due}
                self.pending = step, due, means, {n: self.own[n].copy() for n in due}
                if step < warm or not overlap:
                    self.apply(outer=step >= warm)

    def apply(self, outer: bool = True) -> None:
        assert self.pending
        _, due, means, taken = self.pending
        self.pending = None
        for name in due:
            grad = -means[name]
            if outer and self.outer:
                self.momentum[name] = self.outer.get("momentum", 0.0) * self.momentum[name] + grad
                push = self.outer.get("momentum", 0.0) * self.momentum[name]
                grad = self.outer["lr"] * (grad + push if self.nesterov else self.momentum[name])
            self.base[name] = self.base[name] - grad
            mixing = self.options.get("mixing", 1.0) if outer else 1.0
            self.own[name] += mixing * (self.base[name] - taken[name])


CASES: dict[str, dict[str, Any]] = {
    "plain": {"communication_delay": 4},
    "heavy": {"communication_delay": 4, "outer_optimizer": HEAVY},
    "nesterov": {"communication_delay": 3, "outer_optimizer": NESTEROV},
    "options of SGD": {"communication_delay": 3, "outer_optimizer": dict(NESTEROV.keywords)},
    "warm": {"communication_delay": 5, "outer_optimizer": NESTEROV, "warmup_exchanges": 6},
    "overlap": {"communication_delay": 5, "outer_optimizer": NESTEROV, "overlap": 2},
    "all the way": {"communication_delay": 4, "outer_optimizer": HEAVY, "overlap": 4, "mixing": 0.5},
    "delayed": {"communication_delay": 1, "overlap": 1},
    "mixing": {"communication_delay": 3, "outer_optimizer": HEAVY, "mixing": 0.25},
    "fragments": {"communication_delay": 5, "outer_optimizer": NESTEROV, "fragments": 2},
    "all of it": {"communication_delay": 6, "outer_optimizer": NESTEROV, "fragments": 2, "overlap": 3,
                  "mixing": 0.75, "warmup_exchanges": 4},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_rule_is_that_of_the_oracle(case: str) -> None:
    options = CASES[case]
    commons: list[list[bytes]] = [[] for _ in range(WORLD)]

    def run(rank: int, optimizer: Any, named: Named) -> None:
        for _ in range(26):
            pull(rank, named)
            optimizer.step()
            base = optimizer._updates._exchange.base
            commons[rank].append(b"".join(tensor.numpy().tobytes() for tensor in base))

    named, _ = train(sgd, run, "none", {"schedule": "layerwise"}, WORLD, **options)
    outer = options.get("outer_optimizer", {})
    keywords = dict(getattr(outer, "keywords", outer))
    oracle = Oracle(keywords, keywords.pop("nesterov", False), options)
    oracle.run(26)
    for rank, mine in enumerate(named):
        for name, parameter in mine.items():
            np.testing.assert_allclose(parameter.detach().numpy(), oracle.own[name][rank], rtol=0, atol=2e-6)
    assert commons[0] == commons[1] == commons[2]
    assert len(set(commons[0])) > 4  # else it would say nothing


@pytest.mark.parametrize(
    "sample",
    [pytest.param(one, id=one.name, marks=[] if one.quick else [pytest.mark.slow]) for one in samples()],
)
def test_an_outer_sgd_of_rate_one_changes_no_bit(sample: Sample) -> None:
    ends = []
    for outer in (None, partial(torch.optim.SGD, lr=1.0)):

        def run(rank: int, optimizer: Any, named: Named) -> None:
            for _ in range(4):
                pull(rank, named)
                optimizer.step()

        named, _ = train(sgd, run, sample.method, sample.options, 2, communication_delay=1, outer_optimizer=outer)
        ends.append([parameter.detach() for mine in named for parameter in mine.values()])
    assert all(torch.equal(*both) for both in zip(*ends, strict=True))
    assert bool((ends[0][0] != 0.5).any())


RESUMED = {
    "outer": ("marsit", {"communication_delay": 4, "outer_optimizer": NESTEROV, "warmup_exchanges": 3}),
    "overlap": ("topk", {"communication_delay": 4, "outer_optimizer": HEAVY, "overlap": 3}),
    "fragments": ("marsit", {"communication_delay": 6, "outer_optimizer": NESTEROV, "fragments": 2, "overlap": 2,
                             "mixing": 0.5}),
    "delayed": ("cd_sgd", {}),
    "shared": ("marsit", {"communication_delay": 2, "overlap": 1, "second_moment": "shared", "warmup_steps": 3,
                          "rebuild_every": 2}),
    "frozen": ("topk", {"communication_delay": 3, "outer_optimizer": NESTEROV, "mixing": 0.5}),
}  # fmt: skip


def resumed(case: str, at: int, change: Callable[[int, Any], None] = lambda rank, state: None) -> list[list[Any]]:
    """Return the weights of a whole run of 16 steps, and of one that is resumed after so many."""
    method, options = RESUMED[case]
    ends: list[list[Any]] = [[], []]
    saved: list[Any] = [None, None]

    def run(part: int) -> Callable[[int, Any, Named], None]:
        def steps(rank: int, optimizer: Any, named: Named) -> None:
            if part:
                model, state, kept = saved[rank]
                change(rank, state)
                with torch.no_grad():
                    for name, parameter in named.items():
                        parameter.copy_(model[name])
                optimizer.load_state_dict(state)
                optimizer.compression.load(kept)
            for step in range(at if part else 0, 16):
                if step == at and not part:
                    weights = {name: parameter.detach() for name, parameter in named.items()}
                    saved[rank] = copy.deepcopy((weights, optimizer.state_dict(), optimizer.compression.saved()))
                named["unused"].requires_grad_(case != "frozen" or step < 6)
                pull(rank, named)
                optimizer.step()

        return steps

    for part in range(2):
        kind = adamw if case == "shared" else heavy
        named, _ = train(kind, run(part), method, {"schedule": "layerwise"}, 2, **options)
        ends[part] = [parameter.detach().clone() for mine in named for parameter in mine.values()]
    return ends


@each_value
@pytest.mark.parametrize("case", RESUMED)
@pytest.mark.parametrize("at", [1, 5, 4, 10, 7, 9, *slow(3, 12, 14)])  # `make test` takes them with the cases in turn
def test_resuming_at_any_step_gives_the_same_bits(case: str, at: int) -> None:
    """Also with an exchange under way, between two fragments, and in the steps that are each exchanged."""
    whole, again = resumed(case, at)
    assert all(torch.equal(*both) for both in zip(whole, again, strict=True))


def test_a_state_with_an_exchange_under_way_has_its_results() -> None:
    def forget(rank: int, state: Any) -> None:
        state["horovod_compress"].pop("pending")
        state["horovod_compress"] = resealed(state["horovod_compress"])

    whole, again = resumed("overlap", 5, forget)  # the control: without them the run ends elsewhere
    assert not all(torch.equal(*both) for both in zip(whole, again, strict=True))


@pytest.mark.parametrize(
    ("case", "break_it", "text"),
    [
        ("outer", lambda state: state.pop("outer"), "no outer optimizer; resume with the same outer_optimizer="),
        ("fragments", lambda state: state["fragments"].pop(), "had 1 fragment"),
        ("overlap", lambda state: state["pending"]["rhythm"].update(delay=5), "an exchange under way with delay=5"),
        ("overlap", lambda state: state["pending"].pop("sent"), "what is pending"),
        ("overlap", lambda state: state["pending"].update(bad=["other"]), "what is pending"),
        ("overlap", lambda state: state["pending"].update(names=["used", "other"]), "exchanged other"),
        ("overlap", lambda state: state.update(pending=7), "what is pending"),
    ],
)
def test_states_of_other_options_are_refused(case: str, break_it: Callable[[Any], Any], text: str) -> None:
    def change(rank: int, state: Any) -> None:
        break_it(state["horovod_compress"])
        state["horovod_compress"] = resealed(state["horovod_compress"])

    with pytest.raises(StateError, match=text):
        resumed(case, 5, change)


def test_a_burst_of_one_rank_moves_the_common_weights_no_further_than_usual() -> None:
    moves: dict[str | None, list[float]] = {}
    norms, met = [0.0] * 4, threading.Barrier(4)

    def gather(rank: int, norm: float) -> list[float]:
        norms[rank] = norm
        met.wait(20)
        found = list(norms)
        met.wait(20)
        return found

    for clip in ("median", None):

        def run(rank: int, optimizer: Any, named: Named, clip: str | None = clip) -> None:
            before = torch.cat([parameter.detach().clone() for parameter in named.values()])
            if clip:  # this fleet has no gather of its own
                optimizer._updates._exchange._norms = partial(gather, rank)
            for step in range(12):
                pull(rank, named)
                if (rank, step) == (1, 7):
                    for parameter in named.values():
                        assert parameter.grad is not None
                        parameter.grad *= 200.0
                optimizer.step()
                if step % 2:
                    now = torch.cat([parameter.detach().clone() for parameter in named.values()])
                    if rank == 0:
                        moves.setdefault(clip, []).append(float((now - before).norm()))
                    before = now

        train(sgd, run, "none", world=4, communication_delay=2, clip=clip)
    assert moves["median"][3] < 1.5 * max(moves["median"][:3])
    assert moves[None][3] > 5 * max(moves[None][:3])  # the control


def scaled(rank: int, norms: list[float]) -> float:
    """Return what an update's norm becomes beside those of other ranks."""
    exchange: Any = UpdateExchange.__new__(UpdateExchange)
    exchange.reducer = SimpleNamespace(rank=rank)
    exchange.parameters = [nn.Parameter(torch.full((4,), norms[rank] / 2))]
    exchange.base, exchange._updates = [torch.zeros(4)], [torch.zeros(4)]
    with torch.no_grad():
        exchange._clip([0], lambda mine: norms)
    return float(exchange._updates[0].norm())


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ([1.0, 2.0, 9.0], [1.0, 2.0, 2.0]),
        ([1.0, 900.0], [1.0, 1.0]),  # of two, the lower one
        ([0.0, 0.0, 3.0], [0.0, 0.0, 3.0]),  # a gradient scaler has skipped on two
        ([1.0, 2.0, float("nan"), float("inf")], [1.0, 1.0, float("nan"), float("inf")]),
    ],
    ids=str,
)
def test_no_update_is_longer_than_the_median(norms: list[float], expected: list[float]) -> None:
    found = [scaled(rank, norms) for rank in range(len(norms))]
    assert found == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("at", [2, 5])
def test_exchanges_go_on_after_one_that_was_not_finite(at: int) -> None:
    """In the last of the steps that are each exchanged, and in flush()."""
    ends: list[Any] = [None, None]

    def run(rank: int, optimizer: Any, named: Named) -> None:
        for step in range(12):
            pull(rank, named)
            if (rank, step) == (1, at):
                assert named["used"].grad is not None
                named["used"].grad[5] = torch.nan
            try:
                optimizer.step()
                if step == 5:
                    optimizer.flush()
            except NonFiniteError:
                assert step == at
        ends[rank] = optimizer._updates.since, optimizer._updates.exchanges
        optimizer.load_state_dict(optimizer.state_dict())

    named, _ = train(sgd, run, "none", communication_delay=1 if at == 2 else 2, warmup_exchanges=3)
    assert ends == [(0, 12 if at == 2 else 8)] * 2
    assert all(torch.equal(named[0][name], named[1][name]) for name in LENGTHS)


@pytest.mark.parametrize("mixing", [0.5, 1.0])
@pytest.mark.parametrize("overlap", [0, 2])
def test_what_is_frozen_and_thawed_is_equal_after_a_flush(mixing: float, overlap: int) -> None:
    """Also where weights were apart when it was frozen."""
    options = {"communication_delay": 3, "mixing": mixing, "overlap": overlap, "outer_optimizer": NESTEROV}
    for thawed in (99, 8):

        def run(rank: int, optimizer: Any, named: Named, thawed: int = thawed) -> None:
            for step in range(11):
                named["unused"].requires_grad_(not 4 <= step < thawed)
                pull(rank, named)
                optimizer.step()
            optimizer.flush()

        named, _ = train(heavy, run, "none", {"schedule": "layerwise"}, WORLD, **options)
        for name in LENGTHS:
            assert torch.equal(named[0][name], named[1][name]) and torch.equal(named[0][name], named[2][name])


@each_value
@pytest.mark.parametrize("method", ["none", "topk", "marsit"])
@pytest.mark.parametrize("options", [{"overlap": 2}, {"mixing": 0.5}, {"overlap": 2, "mixing": 0.5}, {"fragments": 2}])
def test_what_is_frozen_goes_to_the_common_weights_once_and_rests(method: str, options: dict[str, Any]) -> None:
    """Frozen after local step 7, the first of a cycle of three; residuals and an outer momentum wait."""
    seen: list[list[torch.Tensor]] = [[] for _ in range(WORLD)]

    def run(rank: int, optimizer: Any, named: Named) -> None:
        for step in range(24):
            named["unused"].requires_grad_(step < 7)
            pull(rank, named)
            optimizer.step()
            if step in (11, 12, 14, 18, 23):
                seen[rank].append(named["unused"].detach().clone())
        optimizer.flush()
        seen[rank].append(named["unused"].detach().clone())

    given = {"communication_delay": 3, "outer_optimizer": NESTEROV} | options
    train(sgd, run, method, {"schedule": "layerwise"}, WORLD, **given)
    assert all(torch.equal(found, seen[0][0]) for mine in seen for found in mine)


@pytest.mark.parametrize("outer", [None, NESTEROV])
@pytest.mark.parametrize("method", ["none", "topk"])
def test_flush_leaves_fragments_that_were_just_exchanged(method: str, outer: Any) -> None:
    def run(rank: int, optimizer: Any, named: Named) -> None:
        for _ in range(6):
            pull(rank, named)
            optimizer.step()
        before = named["used"].detach().clone()
        first, second = optimizer._updates.fragments
        assert second.strayed and not first.strayed
        optimizer.flush()
        assert torch.equal(named["used"].detach(), before)
        assert torch.equal(optimizer._updates._exchange.base[0], before)

    options = {"communication_delay": 4, "fragments": 2, "outer_optimizer": outer}
    named, _ = train(sgd, run, method, {"schedule": "layerwise"}, WORLD, **options)
    assert all(torch.equal(named[0][name], theirs[name]) for theirs in named for name in LENGTHS)


def test_flush_restores_the_other_fragments_after_weights_that_are_not_finite() -> None:
    def run(rank: int, optimizer: Any, named: Named) -> None:
        for step in range(2):
            pull(rank, named)
            for parameter in named.values() if (rank, step) == (1, 1) else ():
                parameter.detach()[0] = torch.nan
            with pytest.raises(NonFiniteError) if step else nullcontext():
                optimizer.step()
        finite = [bool(parameter.isfinite().all()) for parameter in named.values()]
        assert sum(finite) == (1 if rank == 1 else 2), "one fragment waits for its own exchange"
        with pytest.raises(NonFiniteError):
            optimizer.flush()
        assert all(parameter.isfinite().all() for parameter in named.values())
        pull(rank, named)
        optimizer.step()
        optimizer.flush()

    options = {"communication_delay": 4, "fragments": 2}
    named, _ = train(sgd, run, "none", {"schedule": "layerwise"}, WORLD, **options)
    assert all(torch.equal(named[0][name], theirs[name]) for theirs in named for name in LENGTHS)


def test_a_step_that_fails_leaves_nothing_of_a_scaler() -> None:
    """It would multiply its next scale by what it finds."""

    def run(rank: int, optimizer: Any, named: Named) -> None:
        scaler, moved, step = torch.amp.GradScaler("cpu", init_scale=1024.0), [], 0

        def spoil(*given: Any) -> None:
            if step == 2 and rank == 1:
                named["used"].detach()[0] = torch.nan

        optimizer.register_step_post_hook(spoil)
        for step in range(5):
            for name, parameter in named.items():
                parameter.grad = 1024.0 * (parameter.detach() - target(rank, name))
            scaler.scale(torch.ones(()))
            before = named["unused"].detach().clone()
            with pytest.raises(NonFiniteError) if step == 2 else nullcontext():
                scaler.step(optimizer)
            scaler.update()
            moved.append(float((named["unused"].detach() - before).abs().max()))
        assert moved[3] > 0.5 * moved[1]

    train(sgd, run, "none", {"schedule": "layerwise"}, WORLD)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ExchangeError])
def test_a_failure_while_a_state_is_saved_is_the_one_that_is_told(failure: type[BaseException]) -> None:
    """And weights go back to the common ones, though whoever saves is not in a step."""

    def run(rank: int, optimizer: Any, named: Named) -> None:
        for _ in range(4):
            pull(rank, named)
            optimizer.step()
        exchange = optimizer._updates._exchange
        optimizer._updates.settle()
        optimizer._updates.pending.step = 0  # as if its results were still to come

        def fetch(*given: Any) -> bool:
            raise failure("meant")

        exchange._fetch = fetch
        with torch.enable_grad(), pytest.raises(failure, match="meant"):
            optimizer.state_dict()
        del exchange._fetch
        assert optimizer._updates.pending is None
        assert all(torch.equal(p, base) for p, base in zip(named.values(), exchange.base, strict=True))

    train(sgd, run, "none", {}, WORLD, communication_delay=3, overlap=2)


@pytest.mark.parametrize("where", ["step", "flush", "state_dict"])
def test_an_interrupt_in_an_exchange_lets_the_next_one_compare_weights(where: str) -> None:
    """It may find one rank before the end of an exchange, and another one after it."""
    told: list[int] = []

    def run(rank: int, optimizer: Any, named: Named) -> None:
        exchange = optimizer._updates._exchange
        for _ in range(4):
            pull(rank, named)
            optimizer.step()
        apply, fetch = exchange.apply, exchange._fetch

        def interrupted(pending: Any, *given: Any, **more: Any) -> None:
            if rank:
                apply(pending, *given, **more)
            else:
                exchange.receive(pending)
            raise KeyboardInterrupt

        def fetched(*given: Any) -> bool:
            fetch(*given)
            raise KeyboardInterrupt

        exchange.apply, exchange._fetch = (apply, fetched) if where == "state_dict" else (interrupted, fetch)
        pull(rank, named)
        if where == "state_dict" and rank:
            exchange._fetch = fetch
            optimizer.state_dict()
        else:
            with pytest.raises(KeyboardInterrupt):
                getattr(optimizer, where)()
        exchange.apply, exchange._fetch = apply, fetch
        with pytest.raises(MismatchError):
            for _ in range(8):
                pull(rank, named)
                optimizer.step()
        told.append(rank)

    late = {"communication_delay": 3, "overlap": 2} if where == "state_dict" else {}
    train(sgd, run, "none", {}, WORLD, **late | ({"communication_delay": 3} if where == "flush" else {}))
    assert sorted(told) == [*range(WORLD)]


def test_a_local_step_that_failed_on_one_rank_is_made_again() -> None:
    """No exchange had begun."""

    def run(rank: int, optimizer: Any, named: Named) -> None:
        def fail(*given: Any) -> None:
            raise RuntimeError("meant")

        for step in range(4):
            pull(rank, named)
            if step == 2 and rank == 1:
                hook = optimizer.register_step_pre_hook(fail)
                with pytest.raises(RuntimeError, match="meant"):
                    optimizer.step()
                hook.remove()
            optimizer.step()

    named, _ = train(sgd, run, "none", {}, WORLD)
    assert all(torch.equal(named[0][name], theirs[name]) for theirs in named for name in LENGTHS)


KEEPS = ["Adafactor", "Adam", "AdamW", "Adagrad", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


@pytest.mark.parametrize("kind", KEEPS)
def test_an_outer_optimizer_of_any_kind_goes_on_from_its_state(kind: str) -> None:
    """What it keeps may have the weights' shape, or a number for each row or column."""
    common = [torch.ones(6, 4), torch.ones(3, 5)]
    factory = partial(torch.optim.SGD, momentum=0.9) if kind == "SGD" else getattr(torch.optim, kind)
    made = [Outer(factory, [weights.clone() for weights in common]) for _ in range(2)]
    for step in range(4):
        if step == 2:
            state = made[0].state_dict()
            made[1].check(state)
            made[1].load_state_dict(state)
            for mine, theirs in zip(made[0]._weights, made[1]._weights, strict=True):
                theirs.data.copy_(mine.data)
        for outer in made if step >= 2 else made[:1]:
            with torch.no_grad():
                outer.step({0: torch.full((6, 4), 0.1), 1: torch.full((3, 5), 0.2)})
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(made[0]._weights, made[1]._weights, strict=True))
    with pytest.raises(StateError, match="other weights"):
        Outer(factory, [torch.ones(6, 5), torch.ones(3, 7)]).check(made[0].state_dict())


@pytest.mark.parametrize("first", ["optimizer", "compression"])
def test_a_state_is_loaded_where_another_exchange_is_under_way(first: str) -> None:
    ends: list[list[Any]] = [[], []]

    def run(rank: int, optimizer: Any, named: Named) -> None:
        def steps(start: int, end: int) -> None:
            for step in range(start, end):
                pull(rank, named)
                named["used"].grad *= 1 + step % 3  # type: ignore[operator]
                optimizer.step()

        steps(0, 5)
        weights = [parameter.detach().clone() for parameter in named.values()]
        saved = copy.deepcopy((optimizer.state_dict(), optimizer.compression.saved()))
        steps(5, 10)
        steps(5, 14)
        ends[rank].append([parameter.detach().clone() for parameter in named.values()])
        loads = [lambda: optimizer.load_state_dict(saved[0]), lambda: optimizer.compression.load(saved[1])]
        if first == "compression":
            optimizer._updates.settle()  # as a session does before it loads
            loads.reverse()
        for load in loads:
            load()
        with torch.no_grad():
            for parameter, before in zip(named.values(), weights, strict=True):
                parameter.copy_(before)
        steps(5, 10)
        steps(5, 14)
        ends[rank].append([parameter.detach().clone() for parameter in named.values()])

    train(heavy, run, "topk", {"density": 0.5}, 2, communication_delay=4, overlap=3, outer_optimizer=HEAVY)
    for whole, again in ends:
        assert all(torch.equal(*both) for both in zip(whole, again, strict=True))


@pytest.mark.parametrize(
    ("method", "steps", "both", "told"),
    [
        ("topk", 5, False, 1),
        ("sketch_fusion", 5, False, 1),
        ("topk", 5, True, 0),
        ("topk", 2, False, 0),  # before the first exchange
        ("qsgd", 5, False, 0),
    ],
)
def test_a_compression_that_begins_where_its_optimizer_goes_on_is_told_of(
    method: str, steps: int, both: bool, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    saved: dict[int, Any] = {}

    def run(rank: int, optimizer: Any, named: Named) -> None:
        if state := saved.get(rank):
            optimizer.load_state_dict(state[0])
            if both:
                optimizer.compression.load(state[1])
        for _ in range(steps):
            pull(rank, named)
            optimizer.step()
        saved[rank] = copy.deepcopy((optimizer.state_dict(), optimizer.compression.saved()))
        optimizer.flush()

    for _ in range(2):
        train(sgd, run, method, {}, 2, communication_delay=3)
    texts = [record.getMessage() for record in caplog.records if "residuals, is lost" in record.getMessage()]
    assert len(texts) == told * 2 and all("with 1 exchange(s) behind it" in text for text in texts)


def test_a_scaler_that_skips_on_one_rank_does_not_keep_an_exchange_from_ending() -> None:
    def run(rank: int, optimizer: Any, named: Named) -> None:
        for step in range(9):
            pull(rank, named)
            if step in (3, 4) and rank == 1:
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(1.0)
                named["used"].grad[3] = torch.inf  # type: ignore[index]
            optimizer.step()
            vars(optimizer).pop("found_inf", None), vars(optimizer).pop("grad_scale", None)
        assert optimizer._updates.exchanges == 3
        optimizer.flush()

    named, _ = train(sgd, run, communication_delay=3, overlap=2)
    assert torch.equal(named[0]["used"], named[1]["used"]) and bool(named[0]["used"].isfinite().all())


def test_momentum_that_is_dropped_during_an_exchange_is_no_error() -> None:
    def run(rank: int, optimizer: Any, named: Named) -> None:
        for step in range(7):
            pull(rank, named)
            if step == 3 and rank == 1:
                optimizer.state.clear()
            optimizer.step()
            if step == 3 and rank == 1:
                optimizer.state.clear()
        optimizer.flush()

    named, _ = train(heavy, run, "topk", {"density": 0.5}, 2, communication_delay=3, overlap=2)
    assert all(torch.equal(named[0][name], named[1][name]) for name in LENGTHS)


def test_methods_that_send_all_elements_need_no_masks_of_momentum() -> None:
    def run(rank: int, optimizer: Any, named: Named) -> None:
        for _ in range(4):
            pull(rank, named)
            optimizer.step()
        saved = optimizer.state_dict()["horovod_compress"]["pending"]
        assert [bool(masks) for masks in saved["sent"]] == [optimizer.compression.method == "topk"] * 2

    for method in ("marsit", "topk"):
        train(heavy, run, method, communication_delay=3, overlap=2)


@pytest.mark.parametrize("overlap", [0, 1])
def test_what_is_not_finite_leaves_the_common_weights(overlap: int) -> None:
    refused: list[list[int]] = [[], []]

    def run(rank: int, optimizer: Any, named: Named) -> None:
        for step in range(9):
            pull(rank, named)
            if (rank, step) == (1, 3):
                assert named["used"].grad is not None
                named["used"].grad[5] = torch.nan
            base = [tensor.clone() for tensor in optimizer._updates._exchange.base]
            try:
                optimizer.step()
            except NonFiniteError:
                refused[rank].append(step)
                assert torch.equal(base[0], optimizer._updates._exchange.base[0])
                assert torch.equal(base[0], named["used"])
        optimizer.flush()
        assert all(bool(parameter.isfinite().all()) for parameter in named.values())

    options = {"communication_delay": 2, "outer_optimizer": NESTEROV, "overlap": overlap}
    named, _ = train(sgd, run, "none", {"schedule": "layerwise"}, 2, **options)
    assert refused == [[3 + overlap]] * 2
    assert all(torch.equal(named[0][name], named[1][name]) for name in LENGTHS)


@each_value
@pytest.mark.parametrize("outer", [None, NESTEROV, HEAVY])
@pytest.mark.parametrize(
    ("method", "own"), [("none", {}), ("marsit", {"full_precision_every": 0}), ("topk", {"density": 0.1})]
)
def test_flush_at_the_end_of_a_cycle_only_ends_the_exchange(method: str, own: dict[str, Any], outer: Any) -> None:
    """A second exchange, of nothing, would be a step of the outer momentum, and send what waits in residuals."""

    def run(rank: int, optimizer: Any, named: Named) -> None:
        for exchanges in (1, 2):
            for _ in range(3):
                pull(rank, named)
                optimizer.step()
            optimizer.flush()
            optimizer.flush()
            assert optimizer._updates.exchanges == exchanges

    ends = []
    for overlap in (0, 2):
        options = {"communication_delay": 3, "overlap": overlap, "outer_optimizer": outer}
        named, _ = train(sgd, run, method, own, WORLD, **options)
        ends.append(named[0])
        assert all(torch.equal(named[0][name], theirs[name]) for theirs in named for name in LENGTHS)
    assert all(torch.equal(*both) for both in zip(ends[0].values(), ends[1].values(), strict=True))


@each_value
@pytest.mark.parametrize("outer", [None, NESTEROV, HEAVY])
@pytest.mark.parametrize("options", [{}, {"overlap": 2}, {"fragments": 2}], ids=str)
@pytest.mark.parametrize("more", [0, 1])
def test_flush_with_mixing_exchanges_only_local_steps(more: int, options: dict[str, Any], outer: Any) -> None:
    """Where none was made since an exchange, weights become the common ones; the control has made one."""

    def run(rank: int, optimizer: Any, named: Named) -> None:
        updates = optimizer._updates
        for _ in range(4 + more):
            pull(rank, named)
            optimizer.step()
        ended = [index for fragment in updates.fragments if not fragment.since for index in fragment.indices]
        left, base = len(ended) < len(LENGTHS), updates._exchange.base
        before, kept = copy.deepcopy((base, updates.state_dict().get("outer", {}).get("state", {})))
        assert bool(ended) != more and left == (bool(more) or "fragments" in options)
        optimizer.flush()
        assert updates.exchanges == 1 + left and updates.unfinished() is None
        assert all(map(torch.equal, named.values(), base)) or outer is None
        for index in () if "overlap" in options else ended:  # else the exchange under way has ended meanwhile
            assert torch.equal(base[index], before[index]) and torch.equal([*named.values()][index], base[index])
            if outer:
                state = updates.state_dict()["outer"]["state"][str(index)]
                assert torch.equal(state["momentum_buffer"], kept[str(index)]["momentum_buffer"])

    options = {"communication_delay": 4, "mixing": 0.5, "outer_optimizer": outer} | options
    named, _ = train(sgd, run, "none", {"schedule": "layerwise"}, WORLD, **options)
    assert all(torch.equal(named[0][name], theirs[name]) for theirs in named for name in LENGTHS)


def test_one_rank_goes_on_from_a_larger_job_without_exchanges() -> None:
    """What it had kept of a cycle, or of an exchange under way, ends; nothing is compressed from then on."""
    states: list[dict[str, Any]] = []

    def before(rank: int, optimizer: Any, named: Named) -> None:
        for step in range(8):
            pull(rank, named)
            optimizer.step()
            if rank == 0 and step in (4, 6):  # within a cycle; an exchange is under way
                states.append(copy.deepcopy(optimizer.state_dict()))

    options = {"communication_delay": 3, "overlap": 2, "outer_optimizer": NESTEROV}
    train(heavy, before, "topk", {"density": 0.1}, 2, **options)
    assert [bool(state["horovod_compress"].get("pending")) for state in states] == [False, True]

    def alone(rank: int, optimizer: Any, named: Named) -> None:
        for state, steps in itertools.product([*states, states[0]], (0, 3)):
            optimizer.load_state_dict(copy.deepcopy(state))
            updates = optimizer._updates
            exchanges = updates.exchanges
            for _ in range(steps):
                pull(rank, named)
                optimizer.step()
            ended = [weights.detach().clone() for weights in named.values()]
            optimizer.flush()
            landed = bool(state["horovod_compress"].get("pending")) and not steps  # now, or else in the first step
            kept = [torch.equal(*both) for both in zip(ended, named.values(), strict=True)]
            assert kept == [not landed] * 2, "flush() moves weights where an exchange lands, and else not"
            assert updates.pending is None and updates.exchanges == exchanges and updates.unfinished() is None
            assert not optimizer.state_dict()["horovod_compress"]["base"]

    train(heavy, alone, "topk", {"density": 0.1}, 1, **options)


def test_flush_makes_all_weights_equal_whatever_is_under_way() -> None:
    def run(rank: int, optimizer: Any, named: Named) -> None:
        for step in range(10):
            pull(rank, named)
            optimizer.step()
            if step in (4, 7):
                optimizer.flush()
        optimizer.flush()

    options = {"communication_delay": 4, "fragments": 2, "overlap": 2, "mixing": 0.5, "outer_optimizer": HEAVY}
    named, _ = train(heavy, run, "topk", {"density": 0.5, "schedule": "layerwise"}, 2, **options)
    assert all(torch.equal(named[0][name], named[1][name]) for name in LENGTHS)


OFTEN, NEVER = registry.create("marsit", full_precision_every=10), registry.create("marsit", full_precision_every=0)
OUTER = {"communication_delay": 2, "outer_optimizer": NESTEROV}


@pytest.mark.parametrize(
    ("method", "without", "options", "left_out"),
    [
        ("marsit", NEVER, OUTER, True),
        (OFTEN, NEVER, OUTER, False),  # asked for
        ("marsit", NEVER, {"communication_delay": 1, "outer_optimizer": NESTEROV}, False),
        ("marsit", NEVER, {"communication_delay": 2, "second_moment": "own"}, False),
        (
            per_layer({"used": "marsit", "*": "topk"}),
            per_layer({"used": NEVER, "*": "topk"}),
            OUTER | {"rebuild_every": 50},
            True,
        ),
        (by_step({0: "marsit", 60: "topk"}), by_step({0: NEVER, 60: "topk"}), OUTER, True),
        (by_step({0: OFTEN, 45: "marsit"}), by_step({0: NEVER, 45: NEVER}), OUTER, False),
    ],
)
def test_an_outer_optimizer_leaves_out_full_precision_rounds(
    method: Any, without: Any, options: dict[str, Any], left_out: bool
) -> None:
    """It ends then where a method without them ends, to the bit."""

    def run(rank: int, optimizer: Any, named: Named) -> None:
        for _ in range(51 * options["communication_delay"]):
            pull(rank, named)
            optimizer.step()

    ends = [train(sgd, run, one, {}, 2, **options)[0][0] for one in (method, without)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in LENGTHS) == left_out


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        ({"communication_delay": 3}, [1, 2, 4, 5]),
        ({"communication_delay": 3, "overlap": 2}, [1, 2, 3, 4, 5, 6]),  # an exchange is under way, or steps went on
        ({"communication_delay": 1, "overlap": 1}, [1, 2, 3, 4, 5, 6]),
        ({"communication_delay": 3, "mixing": 0.5}, [1, 2, 3, 4, 5, 6]),  # weights never become the common ones
        ({"communication_delay": 4, "fragments": 2}, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_what_the_end_of_the_training_would_lose_is_told(options: dict[str, Any], lost: list[int]) -> None:
    """Wherever weights differ between ranks, and nowhere else."""
    told: list[int] = []
    weights: dict[int, list[Any]] = {step: [] for step in range(1, 7)}

    def run(rank: int, optimizer: Any, named: Named) -> None:
        for step in range(1, 7):
            pull(rank, named)
            optimizer.step()
            weights[step].append([parameter.detach().clone() for parameter in named.values()])
            if rank == 0 and optimizer._updates.unfinished():
                told.append(step)
        optimizer.flush()
        assert optimizer._updates.unfinished() is None

    train(sgd, run, "none", {"schedule": "layerwise"}, 2, **options)
    differ = [step for step, (mine, its) in weights.items() if not all(map(torch.equal, mine, its))]
    assert told == lost == differ


@pytest.mark.parametrize("options", [{"overlap": 1}, {"mixing": 0.5}, {}])
def test_weights_that_differ_by_design_are_not_told_of(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A rebuild exchanges gradients where each rank has weights of its own."""
    options = {"communication_delay": 2, "warmup_steps": 2, "rebuild_every": 2, "second_moment": "shared"} | options

    def run(rank: int, optimizer: Any, named: Named) -> None:
        for step in range(10):
            pull(rank, named)
            if astray and rank and step == 5:
                with torch.no_grad():
                    named["used"].add_(1.0)
                    optimizer._updates._exchange.base[0].add_(1.0)
            optimizer.step()
        optimizer.flush()

    for astray in (False, True):  # the second one is the control
        train(adamw, run, "marsit", {"verify_every": 1}, 2, **options)
        assert ("weights differ" in caplog.text) == astray


def test_what_is_saved_is_not_lost() -> None:
    def run(rank: int, optimizer: Any, named: Named) -> None:
        pull(rank, named)
        optimizer.step()
        assert optimizer._updates.unfinished()
        optimizer.state_dict()
        assert not optimizer._updates.unfinished()

    train(sgd, run, communication_delay=3)


def test_momentum_is_emptied_where_an_update_was_sent_while_local_steps_go_on() -> None:
    def run(rank: int, optimizer: Any, named: Named) -> None:
        for step in range(4):
            pull(rank, named)
            optimizer.step()
            buffers = [optimizer.state[parameter]["momentum_buffer"] for parameter in named.values()]
            empty = sum(int((buffer == 0).sum()) for buffer in buffers)
            assert empty == (0 if step < 3 else sum(LENGTHS.values()) // 2), step

    train(heavy, run, "topk", {"density": 0.5}, 2, communication_delay=3, overlap=1)


def test_schedules_of_the_outer_rate_count_exchanges_and_ranks_compare_it() -> None:
    def run(rank: int, optimizer: Any, named: Named, odd: int | None = None) -> None:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer.outer, 0.5)
        for step in range(6):
            pull(rank, named)
            optimizer.step()
            if step % 2 and rank != odd:
                schedule.step()

    _, made = train(sgd, run, communication_delay=2, outer_optimizer=HEAVY)
    assert made[0].outer.param_groups[0]["lr"] == 0.5 * 0.5**3
    with pytest.raises(MismatchError, match="the outer optimizer's lr differs between ranks"):
        train(sgd, partial(run, odd=1), communication_delay=2, outer_optimizer=HEAVY)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"outer_optimizer": torch.optim.SGD([torch.ones(1)], lr=1)}, "should be what makes an optimizer"),
        ({"outer_optimizer": torch.optim.LBFGS}, "without a closure"),
        ({"outer_optimizer": {"lr": 0.1, "nesterov": True}}, "cannot be made: ValueError: Nesterov momentum requires"),
        ({"outer_optimizer": lambda weights: torch.optim.SGD(weights[:1], lr=1.0)}, "all the parameters"),
        ({"overlap": 3, "communication_delay": 2}, "overlap should be a whole number from 0 to 2"),
        ({"overlap": 2, "communication_delay": 2, "fragments": 2}, "from 0 to 1, the local steps"),
        ({"fragments": 3, "communication_delay": 4}, "fragments=3 needs as many buckets, and this plan has 2"),
        ({"fragments": 2}, "from 1 to communication_delay=1"),
        ({"mixing": 0.0}, "mixing should be above 0 and at most 1"),
        ({"clip": "mean"}, 'clip should be None or "median"'),
        ({"warmup_exchanges": 0.2}, "give the compression total_steps="),
        ({"warmup_exchanges": 1.5}, "a share of them below 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        train(sgd, lambda *given: None, "none", {"schedule": "layerwise"}, **options)


class _ScheduleFree(torch.optim.SGD):
    def train(self) -> None: ...
    def eval(self) -> None: ...


def test_optimizers_whose_weights_to_evaluate_belong_to_each_rank_are_refused() -> None:
    """As those of schedulefree: after an exchange, eval() would still give each rank a model of its own."""
    with pytest.raises(ConfigError, match=r"_ScheduleFree makes the weights of its eval\(\)"):
        train(lambda parameters: _ScheduleFree(parameters, lr=0.1), lambda *given: None, "none", {})


def test_fragments_are_neighbours_of_about_equal_size() -> None:
    buckets = [([0], 10), ([1, 2], 10), ([3], 10), ([4], 10), ([5], 40), ([6], 0)]
    for number in range(1, 7):
        parts = fragments_of(buckets, number, 12)
        assert [index for part in parts for index in part.indices] == list(range(7))
        assert len(parts) == number and all(part.indices for part in parts)
        assert [part.at for part in parts] == [(p + 1) * 12 // number for p in range(number)]
    assert [part.indices for part in fragments_of(buckets, 2, 12)] == [[0, 1, 2, 3, 4], [5, 6]]


def test_presets_of_local_steps_bring_their_options() -> None:
    for method, delay, outer, overlap in (("diloco", 30, True, 0), ("cd_sgd", 1, False, 1), ("none", 1, False, 0)):
        _, made = train(sgd, lambda *given: None, method, world=2)
        settings = made[0]._updates.settings
        assert (settings.delay, settings.outer, settings.overlap) == (delay, outer, overlap)
    _, made = train(sgd, lambda *given: None, "diloco", world=2, communication_delay=5)
    assert made[0]._updates.settings.delay == 5 and made[0].outer.defaults["nesterov"]
