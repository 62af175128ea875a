"""SGD's step by our kernel, beside torch's: the same weights and states, and torch can take over at any time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from horovod_compress import ops
from horovod_compress.errors import ConfigError
from tests.golden.play import TENSORS
from tests.golden.trained import Checkpoint, Ranks
from tests.property.test_stepping_laws import LAYOUTS, given, kind, lay

LR = 0.01
BUFFER = "momentum_buffer"


def ranks(step: str, make: Callable[..., Any] | None = None, method: str = "marsit", **meet: Any) -> Ranks:
    make = make or kind(torch.optim.SGD, momentum=0.9, weight_decay=0.01)
    return Ranks(TENSORS, method, make, {"step": step} | meet, world=2, warmup_steps=0)


def taker(team: Ranks, rank: int = 0) -> Any:
    return next(iter(team.steps[rank]._takers))


def moved(team: Ranks, rank: int = 0) -> int:
    """Return how many parameters of a rank the kernel moved in the last step."""
    sgd = taker(team, rank).sgd
    return len(sgd._used) if sgd else 0


def in_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    groups = [{"params": [first], "momentum": 0.5, "lr": 0.003}, {"params": others, "weight_decay": 0.3}]
    return torch.optim.SGD(groups, lr=LR)


OPTIMIZERS = {
    "plain": kind(torch.optim.SGD),
    "momentum": kind(torch.optim.SGD, momentum=0.9),
    "decay, damped": kind(torch.optim.SGD, momentum=0.9, weight_decay=0.1, dampening=0.25),
    "nesterov": kind(torch.optim.SGD, momentum=0.9, weight_decay=0.1, nesterov=True),
    "climbs": kind(torch.optim.SGD, momentum=0.9, weight_decay=0.1, maximize=True),
    "fused": kind(torch.optim.SGD, momentum=0.9, fused=True),
    "foreach": kind(torch.optim.SGD, momentum=0.9, foreach=True),
    "tensor of rates": kind(torch.optim.SGD, lr=torch.tensor(LR), momentum=0.9),
    "groups": in_groups,
}


def weights_of(team: Ranks, rank: int = 0) -> list[torch.Tensor]:
    return [p.detach().clone() for p in team.models[rank].values()]


def run_both(make: Callable[..., Any], steps: int) -> tuple[int, int]:
    """Compare each step with torch's from the same state; return how many the kernel moved, and with a ratio."""
    count = ratios = 0
    with ranks("auto", make) as ours, ranks("torch", make) as theirs:
        for number in range(steps):
            values = given(number)
            before = weights_of(ours)
            for team in (ours, theirs):
                team.step(copy.deepcopy(values))
            count += moved(ours)
            assert not moved(theirs)
            ratios += moved(ours) * (ours.steps[0]._norms.given.factor != 1.0)  # type: ignore[union-attr]
            for was, p, q in zip(before, ours.models[0].values(), theirs.models[0].values(), strict=True):
                mine, its = (each.optimizers[0].state.get(w, {}).get(BUFFER) for each, w in ((ours, p), (theirs, q)))
                size = torch.maximum(p.detach().abs(), was.abs()) + (p.detach() - was).abs()
                assert bool(((p - q).detach().abs() <= 4 * torch.finfo(p.dtype).eps * size + 1e-9).all())
                assert (mine is None) == (its is None)
                if mine is not None and its is not None and mine.numel():
                    # What it is made of may cancel out.
                    spacing = torch.finfo(its.dtype).eps * float(its.abs().max())
                    assert bool(((mine - its).abs() <= 4 * spacing).all())
                with torch.no_grad():
                    p.copy_(q)
                    if mine is not None:
                        mine.copy_(its)
            with torch.no_grad():  # and of the other rank
                for p, q in zip(ours.models[1].values(), theirs.models[1].values(), strict=True):
                    p.copy_(q)
                    if (mine := ours.optimizers[1].state.get(p, {}).get(BUFFER)) is not None:
                        mine.copy_(theirs.optimizers[1].state[q][BUFFER])
    return count, ratios


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_step_is_torch_s_within_a_rounding(name: str) -> None:
    """From the first one on where there is no momentum, which begins with torch's."""
    count, ratios = run_both(OPTIMIZERS[name], 5)
    with_momentum = {"plain": 0, "groups": 1}.get(name, len(TENSORS))
    assert count == 5 * len(TENSORS) - with_momentum
    assert ratios  # which the kernel has taken out


def test_without_momentum_the_optimizer_keeps_nothing_as_torch_s_does() -> None:
    """An entry for each parameter, if empty, would let hvd.broadcast_optimizer_state hang where ranks differ."""
    with ranks("auto", OPTIMIZERS["plain"]) as team:
        for number in range(3):
            team.step(given(number))
        assert moved(team) == len(TENSORS)
        assert not team.optimizers[0].state_dict()["state"]


@pytest.mark.slow
def test_200_steps_are_torch_s_within_a_rounding_each() -> None:
    assert run_both(OPTIMIZERS["nesterov"], 200)[0] == 199 * len(TENSORS)


def test_gradients_are_what_they_were_and_versions_count() -> None:
    with ranks("auto") as team:
        for number in range(3):
            versions = [p._version for p in team.models[0].values()]
            results = team.step(given(number))
            for p, result, version in zip(team.models[0].values(), results[0].values(), versions, strict=True):
                assert p.grad is not None and p._version > version
                assert torch.equal(p.grad, result) or not number
        assert moved(team) == len(TENSORS)


def clip(optimizer: torch.optim.Optimizer, *given: Any) -> None:
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)


def test_what_a_program_clips_is_what_is_moved() -> None:
    """A hook of the program's stands before ours."""
    ends = []
    for step in ("auto", "torch"):
        with ranks(step) as team:
            for optimizer in team.optimizers:
                optimizer.register_step_pre_hook(clip)
            for number in range(4):
                team.step(given(number))
            ends.append(weights_of(team))
            assert bool(moved(team)) == (step == "auto")
    assert all(torch.allclose(p, q, rtol=1e-5, atol=1e-7) for p, q in zip(*ends, strict=True))


def test_a_job_goes_on_with_torch_alone_or_with_what_torch_has_saved() -> None:
    with ranks("auto") as team:
        for number in range(4):
            team.step(given(number))
        saved = Checkpoint.of(team)
        for number in range(4, 7):
            team.step(given(number))
        ends = weights_of(team)
        team.steps[0].leave()
        assert taker(team).sgd is None
        optimizer = team.optimizers[0]
        alone = kind(torch.optim.SGD, momentum=0.9, weight_decay=0.01)(
            [torch.nn.Parameter(weight.clone()) for weight in ends]
        )
        alone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for p, q in zip(alone.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True):
            p.grad = torch.ones_like(p)
            q.grad = torch.ones_like(q)
        alone.step(), optimizer.step()
        for p, q in zip(alone.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True):
            assert torch.equal(p, q)
    with ranks("auto") as again:
        saved.resume(again)
        for number in range(4, 7):
            again.step(given(number))
            assert moved(again) == len(TENSORS)
        assert all(torch.equal(p, q) for p, q in zip(again.models[0].values(), ends, strict=True))


def test_a_step_without_an_exchange_is_torch_s_and_takes_the_ratio_out_once() -> None:
    ends = []
    for step in ("auto", "torch"):
        with ranks(step) as team:
            for number in range(3):
                team.step(given(number))
            assert team.steps[0]._norms.given.factor != 1.0  # type: ignore[union-attr]
            for _ in range(2):
                team.optimizers[0].step()
                assert not moved(team)
            ends.append(weights_of(team))
    assert all(torch.allclose(p, q, rtol=1e-5, atol=1e-7) for p, q in zip(*ends, strict=True))


def test_gradients_that_somebody_keeps_are_told_from_new_ones() -> None:
    ends = []
    for step in ("auto", "torch"):
        with ranks(step) as team:
            for number in range(3):
                team.step(given(number))
            kept = [p.grad for p in team.models[0].values()]
            for p in team.models[0].values():
                p.grad = torch.ones_like(p)
            team.optimizers[0].step()
            assert all(grad is not None for grad in kept) and not moved(team)
            ends.append(weights_of(team))
    assert all(torch.allclose(p, q, rtol=1e-5, atol=1e-7) for p, q in zip(*ends, strict=True))


def test_a_step_that_raised_leaves_the_next_one_whole() -> None:
    with ranks("auto") as team:
        for number in range(2):
            team.step(given(number))
        raising = team.optimizers[1].register_step_post_hook(lambda *_: 1 / 0)  # on the last rank that steps
        team.optimizers[1]._optimizer_step_post_hooks.move_to_end(raising.id, last=False)
        with pytest.raises(ZeroDivisionError):
            team.step(given(2))
        raising.remove()
        team.step(given(3))
        assert moved(team, 1) == len(TENSORS)
        assert all(p.grad is not None for p in team.models[1].values())


@pytest.mark.parametrize("how", LAYOUTS)
def test_how_tensors_of_one_rank_lie_changes_no_bit(how: str) -> None:
    ends = []
    for changed in ((), ("kernel",), (BUFFER,), ("kernel", BUFFER)):
        with ranks("auto") as team:
            for number in range(4):
                p = team.models[1]["kernel"]
                if number == 2 and "kernel" in changed:
                    lay(p, how)
                if number == 2 and BUFFER in changed:
                    lay(team.optimizers[1].state[p][BUFFER], how)
                team.step(given(number))  # looks whether ranks have the same weights
            assert moved(team) == moved(team, 1) == len(TENSORS)
            ends.append(weights_of(team, 1))
    for end in ends[1:]:
        assert all(torch.equal(p, q) for p, q in zip(end, ends[0], strict=True))


def test_tensors_that_lie_alike_are_moved_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a model in the format ``channels_last`` do: nothing is copied."""
    places: list[list[int]] = []
    step = ops.sgd_step_all
    monkeypatch.setattr(
        ops, "sgd_step_all", lambda *c, **o: (places.append([t.data_ptr() for t in c[0]]), step(*c, **o))
    )
    with ranks("auto") as team:
        for number in range(3):
            for optimizer, model in zip(team.optimizers, team.models, strict=True):
                p = model["kernel"]
                if number == 2:
                    lay(p, "channels last")
                    lay(optimizer.state[p][BUFFER], "channels last")
            team.step(given(number))
        assert not team.models[1]["kernel"].is_contiguous()
        assert places[-1] == [p.data_ptr() for p in team.models[1].values()]


# ---- where torch takes over in the middle ------------------------------------------------------


def left_in_the_middle(step: str, leave: Callable[[Ranks], None]) -> list[torch.Tensor]:
    """Return the weights after two more steps with gradients of which an exchange was used before."""
    with ranks(step) as team:
        for number in range(3):
            team.step(given(number))
        assert team.steps[0]._norms.given.factor != 1.0  # type: ignore[union-attr]
        leave(team)
        for _ in range(2):
            team.optimizers[0].step()
        return weights_of(team)


@pytest.mark.parametrize("how", ["close", "meet again"])
def test_gradients_left_behind_have_the_ratio_taken_out(how: str) -> None:
    def leave(team: Ranks) -> None:
        if how == "close":
            team.steps[0].leave()
        else:
            team.steps[0].meet(team.optimizers[:1], "own", None, None, match_norm=True, step="torch")

    ends = [left_in_the_middle(step, leave) for step in ("auto", "torch")]
    assert all(torch.allclose(p, q, rtol=1e-5, atol=1e-7) for p, q in zip(*ends, strict=True))


def test_a_kernel_that_raises_leaves_gradients_with_the_ratio_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are shown again, and one group was moved."""
    calls, step = [], ops.sgd_step_all

    def second_fails(*columns: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        step(*columns, **options)

    ends = []
    for how in ("auto", "torch"):
        with ranks(how, in_groups) as team, monkeypatch.context() as patched:
            for number in range(3):
                team.step(given(number))
            if how == "auto":
                before = weights_of(team)
                patched.setattr(ops, "sgd_step_all", second_fails)
                with pytest.raises(MemoryError):
                    team.step(given(3))
                assert [torch.equal(p, q) for p, q in zip(before, weights_of(team), strict=True)].count(False) == 1
                team.optimizers[0].step()  # is torch's
            else:
                team.step(given(3))
            ends.append([p.grad for p in team.models[0].values() if p.grad is not None])
    assert all(torch.allclose(p, q, rtol=1e-5, atol=1e-7) for p, q in zip(*ends, strict=True))


# ---- what is torch's ---------------------------------------------------------------------------


class Mine(torch.optim.SGD):
    """A class of somebody's own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_what_is_left_to_torch() -> None:
    with ranks("torch") as team:
        assert taker(team).sgd is None
    with ranks("auto", kind(Mine)) as team:
        assert taker(team).sgd is None
    with ranks("auto", method="none") as team:  # the bits are Horovod's own
        assert taker(team).sgd is None
    with ranks("auto") as team:
        assert taker(team).sgd is not None  # a control
    with pytest.raises(ConfigError, match='step should be "auto" or "torch"'), ranks("ours"):
        pass


def test_flags_and_scalers_leave_a_step_to_torch() -> None:
    with ranks("auto", kind(torch.optim.SGD, momentum=0.9, fused=True)) as team:
        for number in range(2):
            team.step(given(number))
        for optimizer in team.optimizers:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
        team.step(given(2))
        assert not moved(team)
        for optimizer in team.optimizers:
            del optimizer.grad_scale, optimizer.found_inf
        for optimizer in team.optimizers:
            optimizer.param_groups[0]["differentiable"] = True
        assert taker(team).sgd.chosen({t.name for t in TENSORS}) == frozenset()


def test_ranks_compare_who_steps() -> None:
    from horovod_compress.engine.agreement import differences

    with ranks("auto") as ours, ranks("torch") as theirs:
        found = [each.steps[0].options()[differences.WHO_STEPS] for each in (ours, theirs)]
    assert found == ["auto", "torch"]
