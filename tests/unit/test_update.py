"""Update mode with ranks that are threads: what needs neither Horovod nor processes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from horovod_compress.engine.saved import checkpoint
from horovod_compress.errors import ConfigError, MismatchError, NonFiniteError
from horovod_compress.fronts.horovod.compression import Compression as HorovodCompression
from horovod_compress.fronts.reports import Counters
from horovod_compress.fronts.session import Session
from horovod_compress.fronts.updates import distributed_update_optimizer
from horovod_compress.schedule.plan import TensorSpec
from tests.support.local import Fleet
from tests.support.marks import each_value, slow
from tests.support.states import resealed

WORLD = 2


class Compression:
    """What update mode asks of a compression, on one rank of a fleet."""

    def __init__(self, fleet: Fleet, rank: int, named: dict[str, nn.Parameter], method: str = "") -> None:
        self._fleet, self._reducer = fleet, fleet.reducers[rank]
        self.method = method or fleet.methods.name
        share = lambda value, asked: [value] * fleet.world  # noqa: E731
        job: Any = SimpleNamespace(
            number=rank, row=None, gather=share, gather_all=share, agree=lambda mine, seconds: mine
        )
        self._session = Session(job, fleet.methods, self._reducer, list(named.items()), "fleet")
        self._counters = Counters(self._session, self.method)

    def _for_updates(self, replicate: object) -> Session:
        return self._session

    def _check_update_step(self) -> None:
        pass

    def parameters(self) -> list[nn.Parameter]:
        return self._session.steps.parameters

    def saved(self) -> dict[str, Any]:
        return checkpoint.save(self._reducer, self._fleet.methods)

    def load(self, state: dict[str, Any]) -> None:
        checkpoint.load(self._reducer, self._fleet.methods, state, "restore")


def train(
    kind: Callable[..., torch.optim.Optimizer],
    run: Callable[[int, Any, dict[str, nn.Parameter]], None],
    method: str = "none",
    own: dict[str, Any] | None = None,
    world: int = WORLD,
    **options: Any,
) -> tuple[list[dict[str, nn.Parameter]], list[Any]]:
    """Let every rank run with its optimizer; return parameters and optimizers."""
    shapes = {"used": (40,), "unused": (30,)}
    named = [{n: nn.Parameter(torch.full(s, 0.5)) for n, s in shapes.items()} for _ in range(world)]
    made, errors = [], []
    specs = [TensorSpec(n, s, "float32") for n, s in shapes.items()]
    with Fleet(world, specs, method, **own or {}) as fleet:
        for rank in range(world):
            plain = kind(named[rank].values())
            compression = Compression(fleet, rank, named[rank], method)
            made.append(distributed_update_optimizer(plain, named[rank].items(), compression, **options))
            made[-1].compression = compression

        def one(rank: int) -> None:
            try:
                run(rank, made[rank], named[rank])
                made[rank]._updates.settle()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    if errors:
        raise errors[0]
    return named, made


def held(optimizer: Any) -> dict[str, dict[str, Any]]:
    """Return the second moments that are held, by name."""
    moments: dict[str, dict[str, Any]] = optimizer.state_dict()["horovod_compress"]["second_moment"]["moments"]
    return moments


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def test_a_parameter_without_gradients_is_left_out_of_warmup_and_rebuilding() -> None:
    def run(rank: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        for _ in range(6):
            optimizer.zero_grad()
            named["used"].grad = torch.full((40,), 1.0 + rank)
            optimizer.step()
            assert named["unused"].grad is None

    named, made = train(adamw, run, second_moment="shared", warmup_steps=2, rebuild_every=2)
    for mine, optimizer in zip(named, made, strict=True):
        assert bool((mine["unused"] == 0.5).all()) and mine["unused"] not in optimizer.state
        assert bool((mine["used"] < 0.5).all())
    assert torch.equal(named[0]["used"], named[1]["used"])


@pytest.mark.parametrize(("second_moment", "told"), [("own", 1), ("shared", 0)])
def test_exact_rounds_without_a_shared_second_moment_are_told_of(second_moment: str, told: int, caplog: Any) -> None:
    train(adamw, lambda *given: None, second_moment=second_moment, warmup_steps=2, rebuild_every=2)
    assert caplog.text.count("ignored: warmup_steps=2 and rebuild_every=2, as ranks share no second") == told


@pytest.mark.parametrize("value", [1.0, 0.0, -0.0])
def test_a_gradient_of_one_rank_is_one_for_all(value: float) -> None:
    """Also one of nothing but zeros, of either sign: weights decay then, on all ranks."""

    def run(rank: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        optimizer.zero_grad()
        if rank == 1:
            named["unused"].grad = torch.full((30,), value)
        optimizer.step()

    named, _ = train(adamw, run, second_moment="shared", warmup_steps=2)
    assert bool((named[0]["unused"] < 0.5).all()) and torch.equal(named[0]["unused"], named[1]["unused"])
    assert bool((named[0]["used"] == 0.5).all())


def test_flush_does_not_rebuild_the_second_moment() -> None:
    """Gradients may be cleared by then; the next exchange makes up for it."""
    seen: list[list[torch.Tensor]] = [[], []]

    def run(rank: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        for number in range(5):
            optimizer.zero_grad()
            for parameter in named.values():
                parameter.grad = torch.full(parameter.shape, 1.0 + rank)
            optimizer.step()
            if number == 1:  # one warm-up step, and one of two local steps
                optimizer.zero_grad()
                optimizer.flush()
            seen[rank].append(held(optimizer))

    options = {"second_moment": "shared", "warmup_steps": 1, "rebuild_every": 1, "communication_delay": 2}
    train(adamw, run, **options)
    for mine in seen:
        assert mine[0] == {}  # in the warm-up it is the optimizer's
        assert mine[1]["used"]["steps"] == mine[2]["used"]["steps"] == 1
        assert torch.equal(mine[1]["used"]["moment"], mine[2]["used"]["moment"])
        assert mine[3]["used"]["steps"] == 4  # the exchange after: the control; it stands for all steps since


def test_step_hooks_are_called_once_before_and_after_a_load() -> None:
    counts = [[0, 0], [0, 0]]

    def run(rank: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        part = 0

        def count(*_: Any) -> None:
            counts[rank][part] += 1

        optimizer.register_step_post_hook(count)
        for part in range(2):  # noqa: B007  count() reads it
            for parameter in named.values():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())

    train(lambda parameters: torch.optim.SGD(parameters, lr=0.1), run)
    assert counts == [[1, 1], [1, 1]]


@pytest.mark.parametrize("method", ["dgc", "sketch_fusion"])
def test_momentum_upon_momentum_is_refused(method: str) -> None:
    def nothing(rank: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        pass

    def heavy(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    for kind in (heavy, adamw):
        with pytest.raises(ConfigError, match=f"or {method} momentum=0"):
            train(kind, nothing, method, {"momentum": 0.5, "density": 0.5})
        train(kind, nothing, method, {"momentum": 0.0, "density": 0.5})
    train(lambda p: torch.optim.SGD(p, lr=0.1), nothing, method, {"momentum": 0.5, "density": 0.5})


def test_steps_that_fail_for_numbers_that_are_not_finite_count() -> None:
    counted = []

    def run(rank: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        for number in range(3):
            for parameter in named.values():
                parameter.grad = torch.full_like(parameter, torch.inf if number == 1 and rank == 1 else 1.0)
            if number == 1:
                with pytest.raises(NonFiniteError):
                    optimizer.step()
            else:
                optimizer.step()
        counted.append((optimizer._updates.steps, optimizer._updates.exchanges))

    train(lambda parameters: torch.optim.SGD(parameters, lr=0.1), run)
    assert counted == [(3, 3)] * WORLD


# ---- the second moment ----

SHARED = {"second_moment": "shared", "warmup_steps": 3, "rebuild_every": 2, "communication_delay": 2}


def give(rank: int, step: int, named: dict[str, nn.Parameter], since: int = 5) -> None:
    """Set gradients that differ between ranks: one on both, one from a step on, and on rank 1 only."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    named["used"].grad = torch.randn(40, generator=generator) * torch.logspace(-3, 0, 40)
    named["unused"].grad = torch.randn(30, generator=generator) if rank == 1 and step >= since else None


def digests(optimizer: Any) -> dict[str, tuple[float, list[float]]]:
    """Return what is held, as what can be compared."""
    return {name: (saved["steps"], saved["moment"].tolist()) for name, saved in held(optimizer).items()}


@pytest.mark.parametrize("flushes", [(), (5,)], ids=str)
def test_what_is_held_is_equal_on_all_ranks_and_moves_by_the_mean(flushes: tuple[int, ...]) -> None:
    seen: list[list[Any]] = [[], []]

    def run(rank: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        for step in range(16):
            give(rank, step, named)
            if (step, rank) == (8, 0):  # as a gradient scaler does on the rank where gradients overflowed
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(1.0)
            optimizer.step()
            vars(optimizer).pop("found_inf", None), vars(optimizer).pop("grad_scale", None)
            if step in flushes:
                optimizer.flush()
            seen[rank].append(digests(optimizer))

    _, made = train(adamw, run, **SHARED)
    assert seen[0] == seen[1]
    used, late = ([mine[name][0] if name in mine else None for mine in seen[0]] for name in ("used", "unused"))
    first, second = (7, 9) if flushes else (6, 10)  # exchanges 2 and 4; that of flush() rebuilds nothing
    assert used[:first] == [None] * 3 + [3.0] * (first - 3) and used[first:second] == [first + 1.0] * (second - first)
    assert used[second] == second + 1.0
    assert late[:first] == [None] * first and late[first] == first + 1.0 - 3  # a rank alone has had gradients since
    moments = [torch.tensor(mine["used"][1]) for mine in (seen[0][first], seen[0][second])]
    means = torch.stack([_gradient(rank, second) for rank in range(WORLD)]).mean(0)
    keep, before, after = 0.999 ** (second - first), *(1 - 0.999 ** (step + 1) for step in (first, second))
    assert torch.allclose(moments[1], (keep * before * moments[0] + (1 - keep) * means**2) / after, rtol=1e-4)
    assert made[0].state[made[0].compression.parameters()[1]] == {}  # which it never had


def _gradient(rank: int, step: int) -> torch.Tensor:
    named = {name: nn.Parameter(torch.zeros(1)) for name in ("used", "unused")}
    named["used"] = nn.Parameter(torch.zeros(40))
    named["unused"] = nn.Parameter(torch.zeros(30))
    give(rank, step, named)
    assert named["used"].grad is not None
    return named["used"].grad


def resumed(
    at: int, change: Callable[[int, Any], None] = lambda rank, state: None, method: str = "marsit"
) -> list[list[Any]]:
    """Return weights and what is held of a whole run, and of one that is resumed after so many steps."""
    ends: list[list[Any]] = [[], []]
    saved: list[Any] = [None, None]

    def run(part: int) -> Callable[[int, Any, dict[str, nn.Parameter]], None]:
        def steps(rank: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
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
                give(rank, step, named)
                optimizer.step()

        return steps

    for part in range(2):
        named, made = train(adamw, run(part), method, **SHARED)
        for mine, optimizer in zip(named, made, strict=True):
            ends[part].append(([p.detach().clone() for p in mine.values()], digests(optimizer)))
    return ends


@pytest.mark.parametrize("at", [1, 3, 4, 5, 8, 13, *slow(2, 6, 7, 9, 10, 11, 12, 14)])
def test_resuming_at_any_step_gives_the_same_bits(at: int) -> None:
    """In the warm-up, at its end, between local steps, between rebuildings; 3 steps, then exchanges of 2, then of 2."""
    whole, again = resumed(at)
    for (mine, held_), (theirs, moments) in zip(whole, again, strict=True):
        assert all(torch.equal(*both) for both in zip(mine, theirs, strict=True)) and held_ == moments
    assert whole[0][1] == whole[1][1] and len(whole[0][1]) == 2


@pytest.mark.parametrize("at", [2, 6, 7])
def test_second_moments_that_differ_between_ranks_are_noticed(at: int) -> None:
    """In the warm-up the optimizer's own, afterwards what is held."""

    def change(rank: int, state: dict[str, Any]) -> None:
        if rank == 1:
            held_ = [saved["moment"] for saved in state["horovod_compress"]["second_moment"]["moments"].values()]
            (held_ or [state["state"][0]["exp_avg_sq"]])[0][7:8].mul_(1.001)
            state["horovod_compress"] = resealed(state["horovod_compress"])

    with pytest.raises(MismatchError, match="second moments"):
        resumed(at, change)


def test_a_warm_up_gradient_that_is_not_finite_leaves_no_trace() -> None:
    def run(rank: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        for step in range(8):
            give(rank, step, named)
            if step != 1:
                optimizer.step()
                continue
            if rank == 0:
                named["used"].grad[3] = torch.nan  # type: ignore[index]
            with pytest.raises(NonFiniteError):
                optimizer.step()

    _, made = train(adamw, run, **SHARED)
    assert digests(made[0]) == digests(made[1])
    assert digests(made[0])["used"][0] == 2 + 4  # two steps of three, and a rebuilding
    assert all(bool(torch.tensor(values).isfinite().all()) for _, values in digests(made[0]).values())


@each_value
@pytest.mark.parametrize("size", [1e30, -1e30, 1.0])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_a_square_that_overflows_stops_one_element_as_in_adam(options: dict[str, Any], size: float) -> None:
    """In the local step, whose second moment is infinite there. The control has a usual gradient."""

    def run(rank: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        for step in range(10):
            give(rank, step, named)
            large = rank == 0 and step == 7
            if large:
                named["used"].grad[3] = size  # type: ignore[index]
            before = named["used"].detach().clone()
            optimizer.step()
            moved = named["used"].detach() != before
            if large:
                assert bool(moved[3]) == (size == 1.0) and int(moved.sum()) >= moved.numel() - 1
                assert bool(optimizer.state[named["used"]]["exp_avg_sq"][3].isinf()) == (size != 1.0)

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01, **options)

    named, _ = train(adam, run, "marsit", second_moment="shared", warmup_steps=3, communication_delay=10)
    assert all(bool(parameter.isfinite().all()) for mine in named for parameter in mine.values())


def test_a_rebuilding_that_is_not_finite_waits_for_the_next() -> None:
    def run(rank: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        for step in range(11):
            give(rank, step, named)
            if (step, rank) == (6, 1):
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(1.0)
                named["used"].grad[3] = torch.inf  # type: ignore[index]
            optimizer.step()
            vars(optimizer).pop("found_inf", None), vars(optimizer).pop("grad_scale", None)
            assert step < 3 or digests(optimizer)["used"][0] == (3 if step < 10 else 11)

    _, made = train(adamw, run, **SHARED)
    assert digests(made[0]) == digests(made[1])


@pytest.mark.parametrize("choice", ["shared", "auto", "own"])
def test_a_world_of_one_has_the_stock_optimizer(choice: str) -> None:
    def run(rank: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        for step in range(8):
            give(1, step, named)
            optimizer.step()

    named, made = train(adamw, run, "marsit", world=1, **SHARED | {"second_moment": choice})
    alone = {name: nn.Parameter(torch.full_like(p, 0.5)) for name, p in named[0].items()}
    run(0, adamw(alone.values()), alone)
    assert all(torch.equal(p, alone[name]) for name, p in named[0].items())
    assert "second_moment" not in made[0].state_dict()["horovod_compress"]


@pytest.mark.parametrize(
    ("method", "choice", "options", "shares"),
    [
        ("marsit", "auto", {}, True),
        ("marsit", "own", {}, False),
        ("marsit", "auto", {"amsgrad": True}, False),
        ("none", "auto", {}, False),
        ("none", "shared", {"maximize": True}, True),
        ("none", "shared", {"fused": True}, True),
        ("none", "shared", {"foreach": True, "weight_decay": 0.1}, True),
    ],
)
def test_which_second_moment_is_shared(method: str, choice: str, options: dict[str, Any], shares: bool) -> None:
    def run(rank: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        for step in range(9):
            give(rank, step, named)
            optimizer.step()

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01, **options)

    named, made = train(adam, run, method, **SHARED | {"second_moment": choice})
    assert ("second_moment" in made[0].state_dict()["horovod_compress"]) is shares
    # The last step is an exchange only after a warm-up of 3 steps.
    assert torch.equal(named[0]["used"], named[1]["used"]) is shares


@pytest.mark.parametrize("steps", [0, 40])
def test_where_others_come_again_the_second_moment_is_as_one_rank_has_moved_it(steps: int) -> None:
    """What is held moves among several ranks only. The control makes no step alone: what was held goes on."""
    states: list[dict[str, Any]] = []
    options = {"second_moment": "shared", "warmup_steps": 2, "rebuild_every": 50}

    def go_on(size: float, number: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        if states:
            optimizer.load_state_dict(copy.deepcopy(states[-1]))
        for _ in range(number):
            for parameter in named.values():
                parameter.grad = torch.full(parameter.shape, size)
            optimizer.step()

    def several(rank: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        go_on(1.0, 4, optimizer, named)
        meet.wait(30)
        if rank == 0:
            states.append(copy.deepcopy(optimizer.state_dict()))

    def alone(rank: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        go_on(30.0, steps, optimizer, named)
        states.append(copy.deepcopy(optimizer.state_dict()))

    meet = threading.Barrier(WORLD)
    train(adamw, several, "none", {}, WORLD, **options)
    train(adamw, alone, "none", {}, 1, **options)
    train(adamw, several, "none", {}, WORLD, **options)
    first, last = (state["horovod_compress"]["second_moment"]["moments"] for state in (states[0], states[2]))
    for number, name in enumerate(("used", "unused")):
        state = states[1]["state"][number]
        own = state["exp_avg_sq"] / (1 - 0.999 ** float(state["step"]))
        expected = own if steps else first[name]["moment"]
        torch.testing.assert_close(last[name]["moment"], expected)
        assert bool((expected > 100).all() if steps else (expected < 2).all())
    assert ("second_moment" in states[1]["horovod_compress"]) == (not steps)


def test_a_rank_outside_the_process_set_trains_by_itself() -> None:
    job: Any = SimpleNamespace(included=lambda: False)
    compression = HorovodCompression("topk", [], {}, job)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert compression._for_updates(None) is None
    assert distributed_update_optimizer(optimizer, [], compression) is optimizer
    compression.close()


def test_what_torch_saves_of_an_optimizer_is_refused_as_it_leaves_the_exchange_out() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    def run(rank: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        module = nn.Module()
        for name, parameter in named.items():
            module.register_parameter(name, parameter)
        for step in range(2):
            with pytest.raises(ConfigError, match="checkpoint leaves out"):
                get_optimizer_state_dict(module, optimizer)
            assert optimizer.param_groups[0]["lr"] == 0.01 and optimizer._updates.steps == step
            for parameter in named.values():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()

    train(adamw, run, world=2)
